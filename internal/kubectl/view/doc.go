// Package view turns what the API server and the request routers tell into what a person wants to know: the state of a deployment, what a
// plan is worth, what two plans differ in, and the load of the ranks.
//
// Invariants:
//   - Everything is computed from arguments, the present time among them: nothing is read, and the same arguments give the same text.
//   - Each answer is first a value, whose JSON scripts read, and then drawn from that value alone, so that both say the same.
//   - What is not known is left out, or said to be unknown; no figure is guessed.
package view
