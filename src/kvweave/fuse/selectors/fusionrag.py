"""FusionRAG's query-guided selection: the question alone, attention at the last layer.

Cheap to probe and needs the keys of one layer. Every chunk has its own softmax, so that the budget
spreads over all of them.
"""

from kvweave.fuse.selectors.query_attention import QueryAttention

# as the paper describes it: keys and question at their places in the request
PAPER = QueryAttention(view="question", layers=(-1,), normaliser="chunk")
# as the authors' code does it: keys where they were encoded, question from position 0
CODE = QueryAttention(view="question", layers=(-1,), normaliser="chunk", keys_at="encoding")
