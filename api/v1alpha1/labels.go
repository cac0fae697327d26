package v1alpha1

// Labels and annotations that the operator sets on the objects it creates. Keys under semmoe.io/ are reserved for it.
const (
	// LabelDeployment names the MoEDeployment that an object belongs to.
	LabelDeployment = "semmoe.io/deployment"
	// LabelComponent is the part that a pod plays: engine, worker, router, inspect, profile, plan, answers or tables.
	LabelComponent = "semmoe.io/component"
	// LabelRevision is the revision of the serving workload: a short hash of template, engine, parallelism and model.
	LabelRevision = "semmoe.io/revision"
	// LabelInputs is the short hash of the inputs of an inspection or profiling Job, or of a plan.
	LabelInputs = "semmoe.io/inputs"
	// LabelProfile names the AffinityProfile that an object belongs to.
	LabelProfile = "semmoe.io/profile"
	// LabelPlan names the PlacementPlan that an object belongs to.
	LabelPlan = "semmoe.io/plan"
	// LabelBase stands on plans and profiles that were made because the traffic had drifted, and names the PlacementPlan that
	// the MoEDeployment's spec itself asks for.
	LabelBase = "semmoe.io/base"
	// LabelMonitoring, with any value, is set by users on namespaces whose pods may read the metrics of engines and request
	// routers.
	LabelMonitoring = "semmoe.io/monitoring"

	// AnnotationEngine is the type of a pod's engine; absent for SGLang, where an older version made the pod.
	AnnotationEngine = "semmoe.io/engine"
	// AnnotationEngineOptions is the content of the engine's options file.
	AnnotationEngineOptions = "semmoe.io/engine-options"
	// AnnotationRanks is the number of ranks that requests to an engine pod can be pinned to.
	AnnotationRanks = "semmoe.io/ranks"
	// AnnotationExpertParallelSize is the number of ranks of an engine pod under a plan whose requests have none: attention is
	// TensorParallel.
	AnnotationExpertParallelSize = "semmoe.io/expert-parallel-size"
	// AnnotationPort is the port on which an engine pod serves.
	AnnotationPort = "semmoe.io/port"
	// AnnotationRankPorts are the ports on which the ranks of an engine pod serve, in the order of the ranks, separated by
	// commas; absent where all ranks share the port of AnnotationPort.
	AnnotationRankPorts = "semmoe.io/rank-ports"
	// AnnotationPodsPerReplica is, on an engine pod that answers requests, the number of pods of its replica; absent for one.
	AnnotationPodsPerReplica = "semmoe.io/pods-per-replica"
	// AnnotationModelShape is what routers must know of the model to count activations, as JSON.
	AnnotationModelShape = "semmoe.io/model-shape"
	// AnnotationModelDigest is the full digest of the checkpoint that a revision serves.
	AnnotationModelDigest = "semmoe.io/model-digest"
	// AnnotationServiceAccount is the UID of the ServiceAccount that a request router's pod was made for.
	AnnotationServiceAccount = "semmoe.io/service-account-uid"
	// AnnotationPlanDigest is the full digest of the plan that a pod was made for, and that a plan's ConfigMap holds.
	AnnotationPlanDigest = "semmoe.io/plan-digest"
	// AnnotationRealization is how the plan of an engine pod reaches its engine; absent means EngineMap.
	AnnotationRealization = "semmoe.io/realization"
	// AnnotationRedundantExperts is how many slots a layer of an engine pod has beyond one for each expert; absent means 0.
	AnnotationRedundantExperts = "semmoe.io/redundant-experts"
	// AnnotationOutputChanged, followed by a revision, stands on a plan under which that revision has given other answers than
	// the model without a plan; the value says which. Neither is tried again together: remove the annotation to do so.
	AnnotationOutputChanged = "output-changed.semmoe.io/"
	// AnnotationFailed, followed by a revision, stands on a plan of which that revision was a canary, and was taken back; the value
	// says why. The plan is not tried again: remove the annotation to do so.
	AnnotationFailed = "failed.semmoe.io/"
	// AnnotationMeasured, on a plan, contains the time that its canary saved per step of the engine, and the time that
	// its hardware profile predicts, in microseconds, as JSON. The metric semmoe_plan_predicted_over_measured is their
	// ratio.
	AnnotationMeasured = "semmoe.io/measured"
	// AnnotationRollout stands on a workload that has not proven itself: RolloutCanary or RolloutPromoting.
	AnnotationRollout = "semmoe.io/rollout"
	RolloutCanary     = "Canary"
	RolloutPromoting  = "Promoting"
	// AnnotationProven stands on a workload that was on trial, or beside which another was: it says since when it has served alone.
	AnnotationProven = "semmoe.io/proven"
	// AnnotationRemade stands on a workload of replicas of several pods, and says which of them were made anew since they were last
	// ready, as JSON.
	AnnotationRemade = "semmoe.io/remade"
	// AnnotationEngineRelease is on a workload, and is the release that its engine reports; ReleaseUnknown where it reports none.
	AnnotationEngineRelease = "semmoe.io/engine-release"
	ReleaseUnknown          = "unknown"
	// AnnotationApprove names, by its short digest, the plan that may be rolled out.
	AnnotationApprove = "semmoe.io/approve"
	// AnnotationPlanned stands on a profile that was made for a drift, and names the plan that was made from it. When that is deleted,
	// no other is made from the profile.
	AnnotationPlanned = "semmoe.io/planned"
	// AnnotationReport is the result of an inspection, kept on its Job so that it outlives the Job's pod, or what a plan is
	// worth, kept on its ConfigMap so that it outlives the plan's status.
	AnnotationReport = "semmoe.io/report"

	// ComponentEngine to ComponentTables are the values of LabelComponent. Every object that the operator makes has one.
	ComponentEngine = "engine"
	// ComponentWorker is that of the further pods of a replica that has several: they answer no requests.
	ComponentWorker  = "worker"
	ComponentRouter  = "router"
	ComponentInspect = "inspect"
	ComponentProfile = "profile"
	ComponentPlan    = "plan"
	ComponentAnswers = "answers"
	ComponentTables  = "tables"

	// EngineContainer is the name of the engine's container in a serving pod: an entry of that name in
	// spec.template.spec.containers is merged into it.
	EngineContainer = "engine"

	// ModelMountPath is where spec.model.volume is mounted, read-only, in every pod that reads the checkpoint.
	ModelMountPath = "/models"
	// DatasetVolume is the name of the volume that holds a data set, where that is not the model's.
	DatasetVolume = "dataset"
	// PlanVolume is the name of the volume that holds a plan's ConfigMap.
	PlanVolume = "semmoe-plan"
	// EngineOptionsVolume is the name of the volume with the options file of an engine that has one, EngineOptionsPath the
	// file in the engine's container. Its content is the pod's annotation AnnotationEngineOptions.
	EngineOptionsVolume = "semmoe-engine-options"
	EngineOptionsPath   = "/etc/semmoe/engine/options.yaml"
	// PlanMountPath is where a plan's ConfigMap is mounted in the pods that serve under it.
	PlanMountPath = "/etc/semmoe/plan"
	// TablesVolume is the name of the volume in which an engine that shuffles tokens finds a whole plan, TablesMountPath where it is
	// mounted, and TablesPath the plan's directory there. It is absent where the artifact store was away when the pod started.
	TablesVolume    = "semmoe-tables"
	TablesMountPath = "/var/lib/semmoe"
	TablesPath      = "/var/lib/semmoe/plan"
	// TablesVariable, PlacementVariable and PlanDigestVariable are the environment variables that tell such an engine the path of
	// tables.safetensors, that of placement.json, and the full digest of the plan.
	TablesVariable     = "SEMMOE_TABLES"
	PlacementVariable  = "SEMMOE_PLACEMENT"
	PlanDigestVariable = "SEMMOE_PLAN_DIGEST"
	// CacheVolume is the name of the volume that holds permuted copies of the checkpoint, CacheMountPath where it is mounted.
	CacheVolume    = "semmoe-cache"
	CacheMountPath = "/var/cache/semmoe"
	// AnswersVolume is the name of the volume that holds what the model answers without a plan, AnswersMountPath where it is
	// mounted.
	AnswersVolume    = "semmoe-answers"
	AnswersMountPath = "/etc/semmoe/answers"
	// TablesKey is the key of the ConfigMap that names, by the digest of the plan that pods were made for, the plan whose tables
	// request routers are to use.
	TablesKey = "tables.json"
	// ServicePort is the port of the Service that clients talk to.
	ServicePort = 8000
	// PickerPort is the port on which a request router that is an endpoint picker speaks ext_proc, PickerHealthPort that of its
	// gRPC health service.
	PickerPort       = 9002
	PickerHealthPort = 9003
)
