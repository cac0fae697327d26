"""Token shuffling behind tensor-parallel attention, by the tables of a Sem-MoE plan.

`tables` reads and verifies a plan's files, and needs nothing but Python. The other modules need PyTorch, and compute on the GPU with
Triton where it is there:

  metrics      what the operator reads of an engine: activations, and the tables in use
  forecast     scores of ranks for token ids, and for the ranks of a token's experts in earlier layers
  assign       equally many tokens for each rank: those that lose least by it move
  order        the order that groups tokens by rank, by counting, and its inverse
  collectives  the shuffled reduce-scatter and all-gather
  exchange     the dispatch and combination of the rows that leave their rank, each token at most once for each rank
"""
