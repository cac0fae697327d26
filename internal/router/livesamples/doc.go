// Package livesamples keeps the tokens of sampled requests with the experts that they activated: what a profile of live traffic is
// made of.
//
// Invariants:
//   - Counts tell of no request what it said: token ids and hashed pairs of them, added up. Whole sequences are kept on demand alone.
//   - One model is counted at a time; of another that serves beside it nothing is kept until the first has fallen silent.
//   - Memory is bounded (mostPairs, mostIDs), and so is the share of the time that counting takes (share). Which request is left out for
//     that does not depend on the request.
//   - What was sampled before the time that an observer asks from is in nothing that it is told.
package livesamples
