"""Products, and the warehouses that stock them."""


def get_warehouses() -> list[str]:
    """The names of all warehouses."""
    return [each["name"] for each in database["warehouses"]]


def get_stock(warehouse: str) -> list[dict[str, str | int]]:
    """What a warehouse has: product, pieces, and the price of a piece there."""
    _one("warehouses", warehouse)
    return [
        {"product": each["product"], "pieces": each["pieces"], "price": each["price"]}
        for each in database["stock"]
        if each["warehouse"] == warehouse
    ]


def find_product(product: str) -> list[dict[str, str | int]]:
    """Where a product is in stock: warehouse, pieces, and the price of a piece there."""
    _one("products", product)
    return [
        {"warehouse": each["warehouse"], "pieces": each["pieces"], "price": each["price"]}
        for each in database["stock"]
        if each["product"] == product
    ]


def get_weight(product: str) -> int:
    """The kilograms of one piece of a product."""
    return _one("products", product)["kilograms"]


def get_shipping(warehouse: str) -> dict[str, int]:
    """What a warehouse charges for a parcel: `handling` for each, and `per_kilogram`."""
    found = _one("warehouses", warehouse)
    return {"handling": found["handling"], "per_kilogram": found["per_kilogram"]}


def _one(kind, name):
    for each in database[kind]:
        if each["name"] == name:
            return each
    raise LookupError(f"there is no {name!r} among the {kind}")
