def solve_0(tools):
    free = set(range(8, 18))
    for person in ("Ada", "Bruno", "Farah"):
        hours = tools.get_working_hours(person=person)
        free &= set(range(hours["start"], hours["end"]))
        for each in tools.get_busy(person=person, day="Tuesday"):
            free -= set(range(each["start"], each["end"]))
    return {"day": "Tuesday", "start": min(free), "end": min(free) + 1}


def solve_1(tools):
    people = ("Ada", "Chen", "Dilek", "Emil")
    rooms = [each for each in tools.get_rooms() if each["projector"]]
    rooms.sort(key=lambda each: each["seats"])
    for day in ("Monday", "Tuesday", "Wednesday"):
        free = set(range(8, 18))
        for person in people:
            hours = tools.get_working_hours(person=person)
            free &= set(range(hours["start"], hours["end"]))
            for each in tools.get_busy(person=person, day=day):
                free -= set(range(each["start"], each["end"]))
        for hour in sorted(free):
            for room in rooms:
                taken = tools.get_bookings(room=room["name"], day=day)
                if not any(each["start"] <= hour < each["end"] for each in taken):
                    return {"day": day, "start": hour, "end": hour + 1, "room": room["name"]}


def solve_2(tools):
    days = ("Monday", "Tuesday", "Wednesday")
    rooms = sorted(tools.get_rooms(), key=lambda each: each["seats"])
    taken = {
        (room["name"], day): tools.get_bookings(room=room["name"], day=day)
        for room in rooms
        for day in days
    }

    def hours_of(people):
        found = []
        for number, day in enumerate(days):
            free = set(range(8, 18))
            for person in people:
                hours = tools.get_working_hours(person=person)
                free &= set(range(hours["start"], hours["end"]))
                for each in tools.get_busy(person=person, day=day):
                    free -= set(range(each["start"], each["end"]))
            found += [(number, hour) for hour in sorted(free)]
        return found

    def open_at(when):
        day, hour = days[when[0]], when[1]
        return [
            room
            for room in rooms
            if not any(each["start"] <= hour < each["end"] for each in taken[room["name"], day])
        ]

    reviews = hours_of(("Ada", "Chen", "Emil"))
    for late in hours_of(("Bruno", "Chen", "Dilek", "Farah")):
        for early in reversed([each for each in reviews if each < late]):
            for first in [room for room in open_at(early) if room["projector"]]:
                for second in open_at(late):
                    if second["seats"] >= 4 and second["name"] != first["name"]:
                        pair = ((early, first), (late, second))
                        return [
                            {
                                "day": days[when[0]],
                                "start": when[1],
                                "end": when[1] + 1,
                                "room": room["name"],
                            }
                            for when, room in pair
                        ]
