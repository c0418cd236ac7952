def verify_0(answer, database):
    people = ("Ada", "Bruno", "Farah")

    def fits(hour):
        return all(
            database["hours"][person][0] <= hour < database["hours"][person][1]
            and not any(
                each["person"] == person
                and each["day"] == "Tuesday"
                and each["start"] <= hour < each["end"]
                for each in database["busy"]
            )
            for person in people
        )

    first = min(hour for hour in range(8, 18) if fits(hour))
    return answer == {"day": "Tuesday", "start": first, "end": first + 1}


def verify_1(answer, database):
    people = ("Ada", "Chen", "Dilek", "Emil")

    def free(kind, key, name, day, hour):
        return not any(
            each[key] == name and each["day"] == day and each["start"] <= hour < each["end"]
            for each in database[kind]
        )

    for day in ("Monday", "Tuesday", "Wednesday"):
        for hour in range(8, 18):
            for person in people:
                start, end = database["hours"][person]
                if not start <= hour < end or not free("busy", "person", person, day, hour):
                    break
            else:
                rooms = [
                    (each["seats"], each["name"])
                    for each in database["rooms"]
                    if each["projector"] and free("bookings", "room", each["name"], day, hour)
                ]
                if rooms:
                    best = {"day": day, "start": hour, "end": hour + 1, "room": min(rooms)[1]}
                    return answer == best
    return False


def verify_2(answer, database):
    days = ("Monday", "Tuesday", "Wednesday")

    def free(kind, key, name, day, hour):
        return not any(
            each[key] == name and each["day"] == day and each["start"] <= hour < each["end"]
            for each in database[kind]
        )

    def together(people):
        return [
            (number, hour)
            for number, day in enumerate(days)
            for hour in range(8, 18)
            if all(
                database["hours"][person][0] <= hour < database["hours"][person][1]
                and free("busy", "person", person, day, hour)
                for person in people
            )
        ]

    def rooms(when, wanted):
        return [
            (each["seats"], each["name"])
            for each in database["rooms"]
            if wanted(each) and free("bookings", "room", each["name"], days[when[0]], when[1])
        ]

    plans = [
        (late, (-early[0], -early[1]), first, second)
        for late in together(("Bruno", "Chen", "Dilek", "Farah"))
        for early in together(("Ada", "Chen", "Emil"))
        if early < late
        for first in rooms(early, lambda each: each["projector"])
        for second in rooms(late, lambda each: each["seats"] >= 4)
        if first != second
    ]
    late, early, first, second = min(plans)
    wanted = [
        {"day": days[-early[0]], "start": -early[1], "end": 1 - early[1], "room": first[1]},
        {"day": days[late[0]], "start": late[1], "end": late[1] + 1, "room": second[1]},
    ]
    return answer == wanted
