// Package statistics describes a routing trace by the figures with which publications on Mixture-of-Experts scheduling argue: how
// well a token's experts can be told beforehand, which experts go together, and what earlier layers say about later ones.
//
// Invariants:
//   - A figure of prediction is learnt from train requests and measured on test requests.
//   - Shares are between 0 and 1. What chance alone would reach stands beside a share that means nothing without it.
package statistics
