"""Is what two widely read articles say about KV caches true?

:data:`CLAIMS` has one :class:`Claim` for each statement; its numbers are computed when asked for.
:func:`labkit.experiments.claims.evidence.evidence` finds what was measured, ``claims_table`` there lists both.
"""

from .article_a import ARTICLE_A
from .article_b import ARTICLE_B
from .claim import VERDICTS, Claim

CLAIMS: dict[str, Claim] = {claim.id: claim for claim in (*ARTICLE_A, *ARTICLE_B)}

__all__ = ["CLAIMS", "VERDICTS", "Claim"]
