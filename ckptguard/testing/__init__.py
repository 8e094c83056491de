"""The contracts of `Storage` and of plugins, for authors of others. They need pytest; nothing of ours imports them.

Inherit `StorageContract` in a test file. A fixture `storage` opens a fresh, empty place. Three methods reach the store
without the storage, so that the storage itself is tested::

    import secrets
    import pytest
    from ckptguard.storage import Storage, open_storage
    from ckptguard.testing import StorageContract

    class TestMyStore(StorageContract):
        @pytest.fixture
        def storage(self) -> Storage:
            self.base = f"mystore://bucket/{secrets.token_hex(8)}"
            return open_storage(self.base, must_exist=False)

        def absent(self) -> Storage:                        # its root does not exist
            return open_storage(f"mystore://bucket/absent-{secrets.token_hex(8)}", must_exist=False)

        def put_raw(self, storage, key, data):              # writes an object, replacing what is there
            my_client.put(f"{storage.url}/{key}", data)

        def get_raw(self, storage, key):                    # reads an object
            return my_client.get(f"{storage.url}/{key}")

A store that fsspec opens needs no class of ours: registered with fsspec, its URL is enough. A `Storage` of another kind
is returned by the fixture as it is, and `opened_again` then opens the same place a second time. `secrets` names the
keys that no message may tell. `many` is how many objects the listings of one law hold.

What a store cannot do it says in `Storage.capabilities()`; the laws ask for no more. Readable failures:
``pytest.register_assert_rewrite("ckptguard.testing")`` in the ``conftest.py``, before the import.

`FormatContract`, `CheckContract`, `ChannelContract` and `LayoutContract` are those of plugins. Inherit one, set `name`,
and give the samples that it asks for. `docs/guides/plugins.md` has an example.
"""

from __future__ import annotations

from ckptguard.testing.plugin_contracts import ChannelContract, CheckContract, FormatContract, LayoutContract
from ckptguard.testing.storage_contract import StorageContract

__all__ = ["ChannelContract", "CheckContract", "FormatContract", "LayoutContract", "StorageContract"]
