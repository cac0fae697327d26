// Package forecast scores the ranks for a token of attention tensor parallelism from everything that is known before a
// layer's gate runs: the token and the one before it, the text so far, the experts that the token activated in earlier
// layers, and, while tokens are generated, the routes of earlier positions.
//
// The model is log-linear: each source of evidence is a vector of shares per rank, enters by its logarithm with a learnt
// weight, and the experts of earlier layers add a learnt vector each; a softmax makes shares of the sum. Tables hold what
// is counted, weights are trained on documents whose own counts have been taken out of the tables: a token that occurs in
// one document only is as unknown in training as it will be in service.
//
// LookAhead is another model, for engines that can apply a layer's gate before its attention: it corrects what the gate says. LookBack
// is the smallest one, for engines that know of earlier layers no more than the rank that held most of a token's experts.
//
// Invariants:
//   - A score depends on nothing that the kind of forecast may not know: never on the routes of the layer at hand or of
//     later ones, never on routes of later positions, and with history never on later tokens.
//   - Training is a function of trace, requests and placement, whatever the number of processors.
//   - A model scores in the form in which a plan stores it.
package forecast
