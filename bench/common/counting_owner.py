"""A knowledge tree without bytes, for benches that replay decisions."""

from kvweave.kv.tree import Pages, TreeTier


class CountingOwner:
    """Pages that are only counted: nothing moves."""

    def copy_out(self, pages: Pages) -> Pages:
        return pages

    def copy_in(self, pages: Pages) -> Pages:
        return pages

    def free(self, tier: TreeTier, pages: Pages) -> None:
        pass
