// SPDX-License-Identifier: Apache-2.0

package v1alpha1

// Conditions of a MoEDeployment. Each is always present, with observedGeneration, a reason, and a message that contains
// the action to take.
const (
	// ConditionReady is True when enough replicas serve, with or without a plan.
	ConditionReady = "Ready"
	// ConditionProgressing is True while the operator changes something.
	ConditionProgressing = "Progressing"
	// ConditionDegraded is True when an error is present. The model may still serve.
	ConditionDegraded = "Degraded"
	// ConditionProfiled is True when a profile for the current inputs exists.
	ConditionProfiled = "Profiled"
	// ConditionPlanned is True when a plan for the current inputs exists.
	ConditionPlanned = "Planned"
	// ConditionRolledOut is True when the chosen plan is on all replicas.
	ConditionRolledOut = "RolledOut"
	// ConditionLocalityOnTarget is True when the observed local activation rate is within the threshold of the rate
	// that the plan predicts, and Unknown when the rate cannot be measured.
	ConditionLocalityOnTarget = "LocalityOnTarget"
	// ConditionReconciling is True while the operator works towards the spec of the current generation (kstatus).
	ConditionReconciling = "Reconciling"
	// ConditionStalled is True when the operator makes no progress until a user changes something (kstatus).
	ConditionStalled = "Stalled"
)
