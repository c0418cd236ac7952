"""Calendars and rooms. Times are whole hours of a day, from 8 to 18."""

from typing import Literal

Day = Literal["Monday", "Tuesday", "Wednesday"]


def get_people() -> list[str]:
    """The names of all people."""
    return list(database["hours"])


def get_working_hours(person: str) -> dict[str, int]:
    """When somebody's working day starts and ends."""
    start, end = database["hours"][_person(person)]
    return {"start": start, "end": end}


def get_busy(person: str, day: Day) -> list[dict[str, int]]:
    """When somebody is busy on a day: from `start` up to `end`."""
    _person(person)
    return [
        {"start": each["start"], "end": each["end"]}
        for each in database["busy"]
        if each["person"] == person and each["day"] == day
    ]


def get_rooms() -> list[dict[str, str | int | bool]]:
    """All rooms, with their seats and whether they have a projector."""
    return database["rooms"]


def get_bookings(room: str, day: Day) -> list[dict[str, int]]:
    """When a room is taken on a day: from `start` up to `end`."""
    if all(each["name"] != room for each in database["rooms"]):
        raise LookupError(f"there is no room {room!r}")
    return [
        {"start": each["start"], "end": each["end"]}
        for each in database["bookings"]
        if each["room"] == room and each["day"] == day
    ]


def _person(name):
    if name not in database["hours"]:
        raise LookupError(f"there is nobody called {name!r}")
    return name
