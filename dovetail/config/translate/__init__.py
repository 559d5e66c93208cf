"""Other spellings: verl's names and those of older versions, and keys of other systems that do not exist here."""

from dovetail.config.translate.backends import chosen_groups
from dovetail.config.translate.engines import chosen_file
from dovetail.config.translate.foreign import FOREIGN_KEYS, foreign_key
from dovetail.config.translate.groups import GLOBAL_MICRO_BATCHES, ROLES
from dovetail.config.translate.short import SHORT_NAMES, expand
from dovetail.config.translate.spellings import OTHER_SPELLINGS, TRANSLATIONS, VALUE_SPELLINGS, canonical, translate

__all__ = [
    "FOREIGN_KEYS",
    "GLOBAL_MICRO_BATCHES",
    "OTHER_SPELLINGS",
    "ROLES",
    "SHORT_NAMES",
    "TRANSLATIONS",
    "VALUE_SPELLINGS",
    "canonical",
    "chosen_file",
    "chosen_groups",
    "expand",
    "foreign_key",
    "translate",
]
