"""Addresses of data: which text is one, and the objects that it means."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from dataloader_dispatch.errors import DataError
from dataloader_dispatch.store.reader import CacheSettings, StoredFile, find_object, list_objects
from dist_env import STORE_SCHEMES, StoreSettingsError, split_address

_COLLAPSED = re.compile(rf"({'|'.join(STORE_SCHEMES)}):/?[^/]", re.IGNORECASE)


class Address(NamedTuple):
    """A place in an object store.

    Attributes:
        root: The store, such as ``s3://bucket``.
        key: The path in it, without slashes around it; empty for the whole bucket.
        is_folder: Whether a slash at the end says that it is a folder.
    """

    root: str
    key: str
    is_folder: bool

    def __str__(self) -> str:
        return f"{self.root}/{self.key}" if self.key else self.root


def parse_place(text: str) -> Address | str:
    """The place of a path or an address: in a store, or a path on the disk (also of ``file://``).

    Raises:
        DataError: An address cannot be used, or has lost a slash, as that of a ``Path`` has.
    """
    try:
        parts = split_address(text)
    except StoreSettingsError as error:
        raise DataError(str(error)) from None
    if parts is None:
        if _COLLAPSED.match(text) and not os.path.lexists(text):
            raise DataError(
                f"data path {text!r} looks like an address that has lost a slash, as in Path('s3://...'). "
                "Give it as text, such as 's3://bucket/path'."
            )
        return text
    root, key = parts
    if root == "file://":
        return f"/{key}"
    if root.startswith("memory://"):
        raise DataError(
            f"{text} is memory of this process, and documents are read by several. Write them to a "
            "directory, or pass them as a list."
        )
    return Address(root, key, text.endswith("/"))


def objects_of(place: Address, settings: CacheSettings) -> tuple[list[StoredFile], bool]:
    """The object at an address, or those below it.

    Returns:
        The objects, and whether the address is that of one object. None if there is nothing.

    Raises:
        StoreError: The store cannot be read.
        DataError: obstore is missing, or its settings cannot be used; or the address is one of an object and
            of a folder.
    """
    below = list_objects(place.root, place.key, settings)
    if not place.key or place.is_folder:
        return below, False
    here = find_object(place.root, place.key, settings)
    if here is None or (not here.size and below):  # an empty one stands for the folder
        return below, False
    if below:
        raise DataError(
            f"{place} is an object, and there are objects below {place}/ as well. Write a slash behind it "
            "for those, or rename one."
        )
    return [here], True
