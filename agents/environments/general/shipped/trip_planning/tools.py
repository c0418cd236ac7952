"""What can be asked about cities, their places, and the ways between them."""


def get_all_cities() -> list[str]:
    """The names of all cities."""
    return database["cities"]


def get_all_hotels_by_city(city: str) -> list[str]:
    """The names of a city's hotels."""
    return _names("hotels", city)


def get_all_restaurants_by_city(city: str) -> list[str]:
    """The names of a city's restaurants."""
    return _names("restaurants", city)


def get_all_attractions_by_city(city: str) -> list[str]:
    """The names of a city's attractions."""
    return _names("attractions", city)


def get_infos_by_hotel(hotel: str) -> dict[str, float]:
    """The price of a night and the rating (0 to 5) of a hotel."""
    found = _one("hotels", hotel)
    return {"price": found["price"], "rating": found["rating"]}


def get_infos_by_restaurant(restaurant: str) -> dict[str, float]:
    """The price of a meal and the rating (0 to 5) of a restaurant."""
    found = _one("restaurants", restaurant)
    return {"price": found["price"], "rating": found["rating"]}


def get_infos_by_attraction(attraction: str) -> dict[str, float]:
    """The price of a ticket of an attraction."""
    return {"ticket": _one("attractions", attraction)["ticket"]}


def get_inter_city_transport(from_city: str, to_city: str) -> list[dict[str, str | float]]:
    """The connections from one city to another, and how many hours each takes; an empty list if
    there is none."""
    ends = {_city(from_city), _city(to_city)}
    found = [each for each in database["routes"] if {each["one"], each["other"]} == ends]
    return [{"by": each["by"], "hours": each["hours"]} for each in found]


def _city(name):
    if name not in database["cities"]:
        raise LookupError(f"there is no city {name!r}")
    return name


def _names(kind, city):
    return [each["name"] for each in database[kind] if each["city"] == _city(city)]


def _one(kind, name):
    for each in database[kind]:
        if each["name"] == name:
            return each
    raise LookupError(f"there is nothing called {name!r} among the {kind}")
