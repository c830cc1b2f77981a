"""The structures that C++ functions take, as the sources declare them: `cpp.PassArgs(rows=2, ...)` makes one."""

import ctypes
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

from torch import Tensor

from lantern.engines.cpu.build import SOURCES

NUMBERS = {"int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64, "float": ctypes.c_float, "double": ctypes.c_double}


class Structure(ctypes.Structure):
    """A structure of C++. Pointers are given as tensors, structures or arrays, which live as long as it does.

    What is not given is 0 or null. KeyError for a field that it does not have.
    """

    kinds: ClassVar[dict[str, Any]] = {}  # of fields

    def __init__(self, **fields: Any) -> None:
        super().__init__()
        self.kept = fields
        for name, given in fields.items():
            setattr(self, name, address_of(given) if self.kinds[name] is ctypes.c_void_p else given)


def address_of(given: Any) -> int | None:
    """Return the address of a tensor, a structure or an array; None for None."""
    return None if given is None else given.data_ptr() if isinstance(given, Tensor) else ctypes.addressof(given)


def array(items: Sequence[Structure]) -> Any:
    """Return structures of one kind side by side, None for none."""
    if not items:
        return None
    made: Any = (type(items[0]) * len(items))(*items)
    made.kept = items  # what they point to
    return made


def _declared() -> SimpleNamespace:
    """Read the structures with C's layout, those that others contain first."""
    text = re.sub("//.*", "", "".join(source.read_text(encoding="utf-8") for source in reversed(SOURCES)))
    found = dict[str, Any]()
    for block in re.findall(r'^extern "C" \{$(.*?)^\}$', text, re.DOTALL | re.MULTILINE):
        for name, body in re.findall(r"^struct (\w+) \{$(.*?)^\};$", block, re.DOTALL | re.MULTILINE):
            fields = []
            for kind, names in re.findall(r"(?:const )?(\w+) ([^;]+);", body):
                of = NUMBERS.get(kind) or found.get(kind)
                fields += [(one.strip("* "), ctypes.c_void_p if "*" in one else of) for one in names.split(",")]
            found[name] = type(name, (Structure,), {"_fields_": fields, "kinds": dict(fields)})
    return SimpleNamespace(**found)


cpp = _declared()
