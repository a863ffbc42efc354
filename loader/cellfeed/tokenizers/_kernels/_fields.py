"""Columns and values of the tables that compiled tokenizers work on."""

# Settings of a tokenizer, integers and numbers, and what `tokenize` of cellfeed.tokenizers reports.
(
    TOKENIZER,
    LONGEST,
    N_KNOWN,
    HAS_TIES,
    TOP,
    CLS,
    EOS,
    FUNCTION,
    MASKING,
    MASK_TOKEN,
    N_SETTINGS,
) = range(11)
MASK_FRACTION, MASK_RANDOM, MASK_KEPT, MASK_VALUE, N_NUMBERS = range(5)
N_TOKENS, N_UNKNOWN, FAILED_ROW, FAILED_WHY, N_TOKEN_REPORTS = range(5)
RANKED, BINNED, CALLED = range(3)
UNMASKED, MASKED_TOKENS, MASKED_VALUES = range(3)
NOT_COUNTS, WRONG_LENGTH = range(1, 3)
NO_LABEL = -100  # which cross entropy in torch leaves out
