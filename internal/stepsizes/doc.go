// Package stepsizes describes how many tokens engines compute in a step, over all ranks of a replica. Routers count steps in a Histogram per
// engine pod and report it as a Pod; the manager merges the pods of a deployment into the eight sizes that a plan is made for.
//
// Invariants:
//   - A histogram, a report and a result have a fixed size, whatever an engine counts.
//   - Each of the sizes stands for as many steps as the others; their mean is that of the steps, but for rounding.
//   - What is no number, or out of range, is refused with its name; nothing is derived from it.
package stepsizes
