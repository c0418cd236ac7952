def solve_0(tools):
    city = "Corvane"
    hotels = tools.get_all_hotels_by_city(city=city)
    hotel = min(hotels, key=lambda name: tools.get_infos_by_hotel(hotel=name)["price"])
    restaurants = tools.get_all_restaurants_by_city(city=city)
    cost = {name: tools.get_infos_by_restaurant(restaurant=name)["price"] for name in restaurants}
    first, second = sorted(cost, key=cost.get)[:2]
    sights = tools.get_all_attractions_by_city(city=city)
    sight = min(sights, key=lambda name: tools.get_infos_by_attraction(attraction=name)["ticket"])
    return {
        "time": "2025-10-01",
        "city": city,
        "hotel": hotel,
        "afternoon_restaurant": first,
        "afternoon_attraction": sight,
        "evening_restaurant": second,
    }


def solve_1(tools):
    def hotels(city):
        names = tools.get_all_hotels_by_city(city=city)
        return {name: tools.get_infos_by_hotel(hotel=name)["price"] for name in names}

    def meals(city):
        known = {
            name: tools.get_infos_by_restaurant(restaurant=name)
            for name in tools.get_all_restaurants_by_city(city=city)
        }
        good = [name for name in known if known[name]["rating"] >= 4.0]
        pairs = [(one, two) for one in good for two in good if one != two]
        return min(
            ((known[one]["price"] + known[two]["price"], one, two) for one, two in pairs)
        )

    def sight(city):
        names = tools.get_all_attractions_by_city(city=city)
        return min((tools.get_infos_by_attraction(attraction=name)["ticket"], name) for name in names)

    cities = ("Brevik", "Estaro")
    places = [(hotels(city), meals(city), sight(city)) for city in cities]
    for one, first in sorted(places[0][0].items()):
        for two, second in sorted(places[1][0].items()):
            late = places[1][1][0] <= 390 if first >= 500 else places[0][1][0] < 200
            if first + second <= 1000 and late:
                return [
                    {
                        "time": f"2025-10-0{day + 1}",
                        "city": city,
                        "hotel": (one, two)[day],
                        "afternoon_restaurant": places[day][1][1],
                        "afternoon_attraction": places[day][2][1],
                        "evening_restaurant": places[day][1][2],
                    }
                    for day, city in enumerate(cities)
                ]


def solve_2(tools):
    cities = tools.get_all_cities()
    hotels, meals, sights, hours = {}, {}, {}, {}
    for one in cities:
        for two in cities:
            found = tools.get_inter_city_transport(from_city=one, to_city=two) if one != two else []
            if found:
                hours[one, two] = min(each["hours"] for each in found)
    for city in cities:
        hotels[city] = {
            name: tools.get_infos_by_hotel(hotel=name)
            for name in tools.get_all_hotels_by_city(city=city)
        }
        known = {
            name: tools.get_infos_by_restaurant(restaurant=name)
            for name in tools.get_all_restaurants_by_city(city=city)
        }
        meals[city] = [
            (one, two, known[one], known[two]) for one in known for two in known if one != two
        ]
        sights[city] = {
            name: tools.get_infos_by_attraction(attraction=name)["ticket"]
            for name in tools.get_all_attractions_by_city(city=city)
        }

    def second_day(city, price):
        for one, two, first, second in meals[city]:
            for sight, ticket in sights[city].items():
                ratings = (first["rating"], second["rating"])
                if price >= 800:
                    cheap = first["price"] + second["price"] < 350
                    fine = cheap and min(ratings) >= 4.0 and ticket < 120
                elif price >= 500:
                    fine = max(ratings) >= 4.0 and ticket < 100
                else:
                    fine = max(ratings) >= 4.8
                if fine:
                    return one, two, sight

    others = [city for city in cities if city != "Anlo"]
    for route in [(a, b, c) for a in others for b in others for c in others]:
        legs = list(zip(("Anlo", *route), route))
        if len({*route}) < 3 or any(leg not in hours for leg in legs):
            continue
        if sum(hours[leg] for leg in legs) > 11:
            continue
        for one, first in hotels[route[0]].items():
            for two, second in hotels[route[1]].items():
                for three, third in hotels[route[2]].items():
                    nights = first["price"] + second["price"] + third["price"]
                    middle = second_day(route[1], second["price"])
                    if not middle or third["rating"] < 4.5 or not 1500 <= nights <= 1900:
                        continue
                    days = []
                    for day, city in enumerate(route):
                        free = (*meals[city][0][:2], next(iter(sights[city])))
                        lunch, dinner, sight = middle if day == 1 else free
                        days.append(
                            {
                                "time": f"2025-10-0{day + 1}",
                                "city": city,
                                "hotel": (one, two, three)[day],
                                "afternoon_restaurant": lunch,
                                "afternoon_attraction": sight,
                                "evening_restaurant": dinner,
                            }
                        )
                    return days
