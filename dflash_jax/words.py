"""Numbers beside their nouns, for what people read."""


def counted(number: int, one: str, many: str | None = None) -> str:
    """`1 row`, `2 rows`; `many` where the plural is not the singular with an s."""
    return f"{number} {one if number == 1 else many or one + 's'}"
