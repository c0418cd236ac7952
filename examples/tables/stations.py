"""Questions about weather stations. One file contains readings with gaps, and a nested file
describes the stations."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from statistics import correlation, linear_regression, mean, stdev

from keel.examples.tables.task import Answer, Files, as_csv, as_json, clear_first

NO_READING = -999.0
NAMES = ("Arvik", "Belmar", "Corvo", "Dunmere", "Estrel", "Fjordby", "Galt", "Horrin", "Iskra")
COUNTRIES = ("Norland", "Sudria", "Estania", "Westmark")


@dataclass(frozen=True, slots=True)
class Reading:
    station: str
    time: datetime
    temperature: float | None
    humidity: float | None


@dataclass(frozen=True, slots=True)
class Network:
    readings: tuple[Reading, ...]
    stations: dict[str, tuple[str, int]]
    """The country and the altitude in metres of each station, by name."""

    def temperatures(self, station: str) -> list[tuple[datetime, float]]:
        return [
            (r.time, r.temperature)
            for r in self.readings
            if r.station == station and r.temperature is not None
        ]


def draw_network(draw: random.Random) -> Network:
    names = draw.sample(NAMES, draw.randint(4, 7))
    stations = {name: (draw.choice(COUNTRIES), draw.randint(3, 1800)) for name in names}
    first = datetime(draw.randint(2010, 2024), draw.randint(1, 12), draw.randint(1, 28))
    readings: list[Reading] = []
    for name, (_, altitude) in stations.items():
        warm, trend = draw.uniform(8, 22) - altitude / 200, draw.uniform(-0.2, 0.2)
        for step in range(draw.randint(60, 140)):
            time = first + timedelta(hours=6 * step)
            value = warm + trend * step / 4 + draw.gauss(0, 3)
            damp = min(100.0, max(5.0, 75 - 1.5 * (value - warm) + draw.gauss(0, 6)))
            readings.append(
                Reading(
                    name,
                    time,
                    None if draw.random() < 0.05 else round(value, 1),
                    None if draw.random() < 0.05 else round(damp, 1),
                )
            )
    draw.shuffle(readings)
    return Network(tuple(readings), stations)


def files_of(network: Network) -> Files:
    rows = [
        (
            r.station,
            r.time.isoformat(timespec="minutes"),
            NO_READING if r.temperature is None else r.temperature,
            r.humidity,
        )
        for r in network.readings
    ]
    countries: dict[str, dict[str, dict[str, int]]] = defaultdict(dict)
    for name, (country, altitude) in network.stations.items():
        countries[country][name] = {"altitude_m": altitude}
    return {
        "readings.csv": as_csv(("station", "time", "temperature", "humidity"), rows),
        "stations.json": as_json({"countries": countries}),
    }


ABOUT = (
    "readings.csv has what weather stations measured, in no order: temperature in °C (-999.0 means "
    "that there is none) and humidity in percent (empty where there is none). stations.json has "
    "the country and the altitude of each station."
)


def spread(network: Network, draw: random.Random) -> Answer | None:
    station = draw.choice(sorted(network.stations))
    result = [value for _, value in network.temperatures(station)]
    request = (
        f"What is the sample standard deviation (n − 1) of the temperature at {station}, rounded "
        "to three decimals?"
    )
    return Answer(request, stdev(result), 3)


def together(network: Network, draw: random.Random) -> Answer | None:
    station = draw.choice(sorted(network.stations))
    pairs = [
        (r.temperature, r.humidity)
        for r in network.readings
        if r.station == station and r.temperature is not None and r.humidity is not None
    ]
    remaining, right = zip(*pairs, strict=True)
    request = (
        f"What is Pearson's correlation of temperature and humidity at {station}, over the times "
        "that have both, rounded to three decimals?"
    )
    return Answer(request, correlation(remaining, right), 3)


def trend(network: Network, draw: random.Random) -> Answer | None:
    station = draw.choice(sorted(network.stations))
    result = network.temperatures(station)
    start = min(time for time, _ in result)
    days = [(time - start).total_seconds() / 86_400 for time, _ in result]
    slope = linear_regression(days, [value for _, value in result]).slope
    request = (
        f"By how many °C a day does the temperature at {station} change, by the slope of the least-"
        "squares line through all its readings, rounded to four decimals?"
    )
    return Answer(request, slope, 4)


def warmest_country(network: Network, draw: random.Random) -> Answer | None:
    means: dict[str, list[float]] = defaultdict(list)
    for name, (country, _) in network.stations.items():
        means[country].append(mean(value for _, value in network.temperatures(name)))
    if len(means) < 2:
        return None
    request = (
        "Take the mean temperature of each station, and of each country the mean of its stations' "
        "means: which country is the warmest? Give its name."
    )
    return clear_first({country: mean(result) for country, result in means.items()}, request)


def jump(network: Network, draw: random.Random) -> Answer | None:
    station = draw.choice(sorted(network.stations))
    days: dict[date, list[float]] = defaultdict(list)
    for time, value in network.temperatures(station):
        days[time.date()].append(value)
    means = {day: mean(result) for day, result in days.items()}
    rises = {
        day.isoformat(): means[day] - means[before]
        for day in means
        if (before := day - timedelta(days=1)) in means
    }
    request = (
        f"On which date was the mean temperature of the day at {station} the furthest above that "
        "of the day before? Answer as YYYY-MM-DD."
    )
    return clear_first(rises, request)


def gaps(network: Network, draw: random.Random) -> Answer | None:
    metres = draw.choice((200, 500, 800, 1100))
    high = {name for name, (_, altitude) in network.stations.items() if altitude > metres}
    count = sum(
        r.station in high and (r.temperature is None or r.humidity is None)
        for r in network.readings
    )
    request = (
        f"How many readings of stations above {metres} m lack the temperature, the humidity or "
        "both?"
    )
    return Answer(request, count, 0) if count else None


QUESTIONS: tuple[Callable[[Network, random.Random], Answer | None], ...] = (
    spread,
    together,
    trend,
    warmest_country,
    jump,
    gaps,
)
