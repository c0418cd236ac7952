def solve_0(tools):
    found = [each for each in tools.find_product(product="fan") if each["pieces"] >= 4]
    best = min(found, key=lambda each: each["price"])
    return {"warehouse": best["warehouse"], "total": 4 * best["price"]}


def solve_1(tools):
    wanted = {"fan": 4, "clock": 2}
    kilograms = sum(tools.get_weight(product=name) * count for name, count in wanted.items())
    best = None
    for warehouse in tools.get_warehouses():
        stock = {each["product"]: each for each in tools.get_stock(warehouse=warehouse)}
        if any(name not in stock or stock[name]["pieces"] < n for name, n in wanted.items()):
            continue
        charges = tools.get_shipping(warehouse=warehouse)
        goods = sum(stock[name]["price"] * count for name, count in wanted.items())
        shipping = charges["handling"] + charges["per_kilogram"] * kilograms
        if best is None or goods + shipping < best["total"]:
            best = {
                "warehouse": warehouse,
                "goods": goods,
                "shipping": shipping,
                "total": goods + shipping,
            }
    return best


def solve_2(tools):
    wanted = {"fan": 3, "clock": 2, "kettle": 1, "mirror": 1}
    weight = {name: tools.get_weight(product=name) * count for name, count in wanted.items()}
    offers = {
        name: {
            each["warehouse"]: each["price"] * count
            for each in tools.find_product(product=name)
            if each["pieces"] >= count
        }
        for name, count in wanted.items()
    }
    charges = {name: tools.get_shipping(warehouse=name) for name in tools.get_warehouses()}
    plans = [{}]
    for name in wanted:
        plans = [{**plan, name: warehouse} for plan in plans for warehouse in offers[name]]
    best = None
    for plan in plans:
        used = set(plan.values())
        if len(used) > 2:
            continue
        shipping = sum(charges[each]["handling"] for each in used) + sum(
            charges[plan[name]]["per_kilogram"] * weight[name] for name in wanted
        )
        total = shipping + sum(offers[name][plan[name]] for name in wanted)
        if best is None or total < best["total"]:
            best = {"from": plan, "shipping": shipping, "total": total}
    return best
