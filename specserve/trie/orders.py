"""Orders to forget text, kept in force against text that arrives after them."""

from __future__ import annotations

from specserve.trie.namespaces import half_of, is_part_of
from specserve.trie.records import Record

MAX_ORDERS = 4096
"""Orders that stay in force; the oldest are let go."""


class Orders:
    """The orders to forget that a log has seen.

    Text may come again, from a replica that has not heard of the order: it must not be taken.

    Args:
        max_bytes: memory of the orders; the oldest are let go first, down to the last one.
    """

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        """Memory of the orders, in bytes."""
        self._max_bytes = max_bytes
        self._orders: dict[tuple[str, str], Record] = {}

    def keep(self, order: Record) -> None:
        """Puts an order in force, in the place of an older one about the same."""
        key = (order.namespace, order.sequence)
        older = self._orders.pop(key, None)
        if older is not None:
            self.num_bytes -= older.num_bytes
            order = max(older, order, key=lambda each: each.stamp)
        self._orders[key] = order
        self.num_bytes += order.num_bytes
        while len(self._orders) > MAX_ORDERS or (
            self.num_bytes > self._max_bytes and len(self._orders) > 1
        ):
            self.num_bytes -= self._orders.pop(next(iter(self._orders))).num_bytes

    def cover(self, text: Record) -> bool:
        """Whether one of them is about this text."""
        if not self._orders:
            return False
        keys = (
            (half_of(text.namespace), ""),
            (text.namespace, ""),
            (text.namespace, text.sequence),
        )
        about_it = (self._orders.get(key) for key in keys)
        return any(order is not None and is_meant(order, text) for order in about_it)

    def in_force(self) -> list[Record]:
        """All of them, the oldest first."""
        return list(self._orders.values())


def is_meant(order: Record, text: Record) -> bool:
    """Whether an order to forget is about this text."""
    if text.stamp > order.stamp:
        return False
    if order.kind == "purge":
        return is_part_of(text.namespace, order.namespace)
    return (order.namespace, order.sequence) == (text.namespace, text.sequence)
