// SPDX-License-Identifier: Apache-2.0

// Package stepsizes describes how many tokens engines compute per step, over all ranks of a replica. Routers count
// steps per engine pod in a Histogram and report it as a Pod. The manager merges the pods of a deployment into the
// eight sizes that a plan is made for.
//
// Invariants:
//   - A histogram, a report and a result have a fixed size, independent of the number of steps.
//   - Each size represents the same number of steps. The mean of the sizes is the mean of the steps, up to rounding.
//   - Values that are not finite or out of range are rejected with the name of the field, and not used.
package stepsizes
