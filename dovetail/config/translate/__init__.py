"""Other spellings: verl's names and those of older versions, and keys of other systems that do not exist here."""

from dovetail.config.translate.asynchronous import SPELLINGS as ASYNC_SPELLINGS
from dovetail.config.translate.foreign import FOREIGN_KEYS, foreign_key
from dovetail.config.translate.groups import FLAT_KEYS, GLOBAL_MICRO_BATCHES, GROUP_SPELLINGS
from dovetail.config.translate.short import SHORT_NAMES, expand
from dovetail.config.translate.spellings import TRANSLATIONS, VALUE_SPELLINGS, canonical, translate

__all__ = [
    "ASYNC_SPELLINGS",
    "FLAT_KEYS",
    "FOREIGN_KEYS",
    "GLOBAL_MICRO_BATCHES",
    "GROUP_SPELLINGS",
    "SHORT_NAMES",
    "TRANSLATIONS",
    "VALUE_SPELLINGS",
    "canonical",
    "expand",
    "foreign_key",
    "translate",
]
