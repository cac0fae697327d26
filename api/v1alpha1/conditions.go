package v1alpha1

// Conditions of a MoEDeployment. Each is always present, with observedGeneration and a reason whose message says what to
// do.
const (
	// ConditionReady is True when enough replicas serve, planned or not.
	ConditionReady = "Ready"
	// ConditionProgressing is True while something is being changed.
	ConditionProgressing = "Progressing"
	// ConditionDegraded is True when something is wrong, although it may still serve.
	ConditionDegraded = "Degraded"
	// ConditionProfiled is True when a profile for the present inputs exists.
	ConditionProfiled = "Profiled"
	// ConditionPlanned is True when a plan for the present inputs exists.
	ConditionPlanned = "Planned"
	// ConditionRolledOut is True when the chosen plan is on all replicas.
	ConditionRolledOut = "RolledOut"
	// ConditionLocalityOnTarget is True when the observed local activation rate is within the threshold of the plan's
	// promise, and Unknown when it cannot be measured.
	ConditionLocalityOnTarget = "LocalityOnTarget"
	// ConditionReconciling is True while work caused by a new generation goes on (kstatus).
	ConditionReconciling = "Reconciling"
	// ConditionStalled is True when nothing more will happen until a human changes something (kstatus).
	ConditionStalled = "Stalled"
)
