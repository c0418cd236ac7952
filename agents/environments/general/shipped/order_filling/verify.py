def verify_0(answer, database):
    offers = [
        (4 * each["price"], each["warehouse"])
        for each in database["stock"]
        if each["product"] == "fan" and each["pieces"] >= 4
    ]
    total, warehouse = min(offers)
    return answer == {"warehouse": warehouse, "total": total}


def verify_1(answer, database):
    wanted = {"fan": 4, "clock": 2}
    weight = {each["name"]: each["kilograms"] for each in database["products"]}
    kilograms = sum(weight[name] * count for name, count in wanted.items())
    parcels = []
    for warehouse in database["warehouses"]:
        prices = [
            each["price"] * wanted[each["product"]]
            for each in database["stock"]
            if each["warehouse"] == warehouse["name"]
            and each["pieces"] >= wanted.get(each["product"], 99)
        ]
        if len(prices) == len(wanted):
            shipping = warehouse["handling"] + warehouse["per_kilogram"] * kilograms
            parcels.append((sum(prices) + shipping, warehouse["name"], sum(prices), shipping))
    total, name, goods, shipping = min(parcels)
    return answer == {"warehouse": name, "goods": goods, "shipping": shipping, "total": total}


def verify_2(answer, database):
    import itertools

    wanted = {"fan": 3, "clock": 2, "kettle": 1, "mirror": 1}
    weight = {each["name"]: each["kilograms"] for each in database["products"]}
    charges = {each["name"]: each for each in database["warehouses"]}
    price = {
        (each["product"], each["warehouse"]): each["price"] * wanted[each["product"]]
        for each in database["stock"]
        if each["pieces"] >= wanted.get(each["product"], 99)
    }

    def costs(chosen):
        plan = list(zip(wanted, chosen))
        if len(set(chosen)) > 2 or any(pair not in price for pair in plan):
            return None
        shipping = sum(charges[name]["handling"] for name in set(chosen))
        for product, name in plan:
            shipping += charges[name]["per_kilogram"] * weight[product] * wanted[product]
        return shipping + sum(price[pair] for pair in plan), shipping

    best = min(filter(None, map(costs, itertools.product(charges, repeat=4))))[0]
    if not isinstance(answer, dict) or set(answer) != {"from", "shipping", "total"}:
        return False
    chosen = answer["from"]
    if not isinstance(chosen, dict) or set(chosen) != set(wanted):
        return False
    if not all(name in charges for name in map(str, chosen.values())):
        return False
    found = costs([chosen[product] for product in wanted])
    if found is None:
        return False
    return {
        "shipping": answer["shipping"] == found[1],
        "total": answer["total"] == found[0],
        "cheapest": found[0] == best,
    }
