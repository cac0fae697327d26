// SPDX-License-Identifier: Apache-2.0

// Package scale measures the operator with many MoEDeployments that share a profile: the time until the last
// MoEDeployment has its plan, and the resources that the manager, a separate process, uses while nothing changes.
package scale
