"""Why something was reused or was not: the one vocabulary of plans, explain records and counters.

The text of a member is what users read and what a counter is labelled with. A sentence that adds
figures begins with the member. docs/planner.md lists every member, and a test holds that list.
"""

from enum import StrEnum


class Reason(StrEnum):
    """Why an option was taken or not, a chunk reused or not, a search guessed or not."""

    # options of a plan
    CHEAPEST = "cheapest"
    RETURNS = "this path comes back: computed once, it is exact from then on"
    DEARER = "dearer than the chosen one"
    DEARER_IN_THE_END = "cheaper now, dearer in the end: this path comes back"
    GAIN_TOO_SMALL = "gain below 10 %"
    TOO_FEW_HITS = "too few stored tokens to be worth it"
    NEEDS_MISSING = "stored chunks lack what the strategy needs"
    NO_LAYERS = "needs the model's critical layers: kvweave calibrate layers"
    TIER_UNKNOWN = "the tier was never measured"
    TIER_TOO_SLOW = "computing is faster than loading"
    FULL_IS_FASTER = "full prefill is faster"

    # the gate
    NOT_CALIBRATED = "not calibrated for this model"
    NO_PROFILE = (
        "this model was never calibrated for this chunk KV, so that only what is exact is reused; "
        "`kvweave calibrate quick --kb DIR` does that in minutes"
    )
    BAD_PROFILE = "the calibration of this model cannot be read; the log names it: calibrate again"
    CALIBRATING = (
        "this model was never calibrated: in idle time its documents are asked about themselves, "
        "and until then only what is exact is reused"
    )
    PERMITTED = "random weights, for load tests: fused by permission, no quality was measured"
    BOUND_NOT_MET = "quality bound not met below ratio 1"
    HALF_BOUND_NOT_MET = (
        "calibrated behind another system prompt or without a history: half the quality bound is "
        "not met"
    )
    BEYOND_MEASURED = "longer than any prompt that was calibrated"
    ORDER_MATTERS = "chunks in another order cost this model more than the quality bound"
    AUDITED = "the audit found it over the bound"
    AUDIT_ROOM = "the audit found room for a smaller ratio"

    # parts of a prompt
    IN_TREE = "exact path in the knowledge tree"
    FIRST = "stored right behind the preamble: exact there"
    FIRST_ROUNDED = "stored right behind the preamble: exact there but for rounding"
    FRONT = "stands in front for the first time: computed there, it is exact"
    STORED = "stored"
    NOT_STORED = "not stored"
    NOT_EXACT = "stored, but not exact here"
    ROUNDED = "stored right behind the preamble, but rounded by its codec: not exact"
    NOT_IN_TREE = "not in the knowledge tree"
    HISTORY = "history of the conversation: not in the knowledge tree"
    ALWAYS = "always computed"
    NOT_ASKED_FOR = "not asked for"
    BETWEEN_CHUNKS = "between chunks"
    IN_VLLM = "vLLM has it"

    # stored bytes that did not come
    ABSENT = "absent"
    CORRUPT = "corrupt"
    FOREIGN = "foreign"
    TIER_FAILED = "tier failed"
    TOO_SLOW = "too slow"

    # whole prompts
    NO_CHUNKS = "the prompt has no chunks"
    NO_MEMORY = "no knowledge base is open, and documents are not remembered"
    NOTHING_STORED = "none of these chunks has stored KV behind this system prompt"
    NOT_MEASURED = (
        "this machine was never measured; idle time does that, or `kvweave measure` at once"
    )
    CLOSE_CALL = "its first token was a close call: what was fused is thrown away, all is exact"
    FUSES_NOTHING = "the strategy that was named fuses nothing"
    FUSING_IS_DEARER = "fusing is dearer than vLLM alone"
    UPSTREAM_SILENT = "the upstream does not say what it had to compute"

    # searches that no guess is made beside
    SPECULATION_OFF = "speculation is off"
    NO_STAGES = "this search has no stages"
    NO_PROMPT_TIMED = "no prompt was timed yet"
    MADE_FIRST = "what the strategy needs beside chunk KV may have to be made first"
    NO_GAIN = "a guess is not expected to gain time"
    SEARCH_TOO_SHORT = "the search is too short to compute anything beside it"


# stored bytes that were wanted and did not come; counters of a store have no other reasons
MISSES = frozenset(
    {Reason.ABSENT, Reason.CORRUPT, Reason.FOREIGN, Reason.TIER_FAILED, Reason.TOO_SLOW}
)
