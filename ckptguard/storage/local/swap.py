"""Two local files change places, so that neither name is ever free."""

from __future__ import annotations

import errno

from ckptguard.storage.failures import translated
from ckptguard.storage.keys import parts_of
from ckptguard.storage.local.folders import folder_of, sync_folder
from ckptguard.storage.local.system_calls import UNSUPPORTED, exchange_names


def swap_files(root: str, one: str, other: str) -> bool:
    """Exchange what lies under two keys below a local root, in one step and durably. False, and nothing was done, where
    the file system cannot, or one of them is not there."""
    *above, name = parts_of(one)
    *beside, other_name = parts_of(other)
    with translated(other, root):
        try:
            with folder_of(root, above) as folder, folder_of(root, beside) as other_folder:
                exchange_names(folder, name, other_folder, other_name)
                sync_folder(other_folder)
                sync_folder(folder)
        except OSError as error:
            if error.errno not in UNSUPPORTED | {errno.EXDEV, errno.ENOENT}:
                raise
            return False
    return True
