// Package scale measures the operator with many MoEDeployments that share a profile: how long the last one waits for its plan, and
// what the manager, a process of its own, needs while nothing changes.
package scale
