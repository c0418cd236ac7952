def verify_0(answer, database):
    kinds = {
        "hotel": "hotels",
        "afternoon_restaurant": "restaurants",
        "afternoon_attraction": "attractions",
        "evening_restaurant": "restaurants",
    }
    form = isinstance(answer, dict) and set(answer) == {"time", "city", *kinds}
    found = {}
    for key, kind in kinds.items():
        for each in database[kind]:
            if form and each["name"] == answer[key] and each["city"] == "Corvane":
                found[key] = each
    if not form or len(found) < 4:
        return False
    one, two = found["afternoon_restaurant"], found["evening_restaurant"]
    return {
        "day": answer["time"] == "2025-10-01" and answer["city"] == "Corvane",
        "hotel": found["hotel"]["price"] <= 500,
        "restaurants": one != two and one["price"] + two["price"] < 300,
        "attraction": found["afternoon_attraction"]["ticket"] < 220,
    }


def verify_1(answer, database):
    kinds = {
        "hotel": "hotels",
        "afternoon_restaurant": "restaurants",
        "afternoon_attraction": "attractions",
        "evening_restaurant": "restaurants",
    }
    cities = ("Brevik", "Estaro")
    if not isinstance(answer, list) or len(answer) != 2:
        return False
    days = []
    for day, city in zip(answer, cities):
        if not isinstance(day, dict) or set(day) != {"time", "city", *kinds}:
            return False
        found = {}
        for key, kind in kinds.items():
            for each in database[kind]:
                if each["name"] == day[key] and each["city"] == city:
                    found[key] = each
        if len(found) < 4:
            return False
        days.append(found)
    meals = [(each["afternoon_restaurant"], each["evening_restaurant"]) for each in days]
    costs = [one["price"] + two["price"] for one, two in meals]
    first, second = (each["hotel"]["price"] for each in days)
    tickets = sum(each["afternoon_attraction"]["ticket"] for each in days)
    return {
        "days": [day["time"] for day in answer] == ["2025-10-01", "2025-10-02"],
        "cities": [day["city"] for day in answer] == list(cities),
        "different restaurants": all(one != two for one, two in meals),
        "ratings": all(each["rating"] >= 4.0 for pair in meals for each in pair),
        "nights": first + second <= 1000,
        "tickets": tickets <= 180,
        "meals": costs[1] <= 390 if first >= 500 else costs[0] < 200,
    }


def verify_2(answer, database):
    kinds = {
        "hotel": "hotels",
        "afternoon_restaurant": "restaurants",
        "afternoon_attraction": "attractions",
        "evening_restaurant": "restaurants",
    }
    if not isinstance(answer, list) or len(answer) != 3:
        return False
    days = []
    for day in answer:
        if not isinstance(day, dict) or set(day) != {"time", "city", *kinds}:
            return False
        found = {}
        for key, kind in kinds.items():
            for each in database[kind]:
                if each["name"] == day[key] and each["city"] == day["city"]:
                    found[key] = each
        if len(found) < 4:
            return False
        days.append(found)
    route = [day["city"] for day in answer]
    hours = 0
    for one, two in zip(["Anlo", *route], route):
        legs = [each["hours"] for each in database["routes"] if {each["one"], each["other"]} == {one, two}]
        hours = hours + min(legs) if legs else 99
    meals = [(each["afternoon_restaurant"], each["evening_restaurant"]) for each in days]
    prices = [each["hotel"]["price"] for each in days]
    ratings = [each["rating"] for each in meals[1]]
    cost = sum(each["price"] for each in meals[1])
    ticket = days[1]["afternoon_attraction"]["ticket"]
    if prices[1] >= 800:
        second = cost < 350 and min(ratings) >= 4.0 and ticket < 120
    elif prices[1] >= 500:
        second = max(ratings) >= 4.0 and ticket < 100
    else:
        second = max(ratings) >= 4.8
    return {
        "days": [day["time"] for day in answer] == ["2025-10-01", "2025-10-02", "2025-10-03"],
        "cities": len({*route}) == 3 and "Anlo" not in route,
        "connections": hours <= 11,
        "different restaurants": all(one != two for one, two in meals),
        "second day": second,
        "last hotel": days[2]["hotel"]["rating"] >= 4.5,
        "nights": 1500 <= sum(prices) <= 1900,
    }
