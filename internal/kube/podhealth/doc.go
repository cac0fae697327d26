// SPDX-License-Identifier: Apache-2.0

// Package podhealth determines what prevents pods from running, and names what to change.
//
// Invariants: a problem depends only on the given pods and events. Its message does not change while the problem lasts,
// so that conditions that contain it are not rewritten.
package podhealth
