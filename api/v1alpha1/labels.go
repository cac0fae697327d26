// SPDX-License-Identifier: Apache-2.0

package v1alpha1

// Labels and annotations of the objects that the operator creates. Keys under semmoe.io/ are reserved for the operator.
const (
	// LabelDeployment is the name of the MoEDeployment that an object belongs to.
	LabelDeployment = "semmoe.io/deployment"
	// LabelComponent is the role of a pod: engine, worker, router, download, inspect, profile, plan, answers or tables.
	LabelComponent = "semmoe.io/component"
	// LabelRevision is the revision of the serving workload: a short hash of template, engine, parallelism and model.
	LabelRevision = "semmoe.io/revision"
	// LabelInputs is the short hash of the inputs of an inspection or profiling Job, or of a plan.
	LabelInputs = "semmoe.io/inputs"
	// LabelProfile is the name of the AffinityProfile that an object belongs to.
	LabelProfile = "semmoe.io/profile"
	// LabelPlan is the name of the PlacementPlan that an object belongs to.
	LabelPlan = "semmoe.io/plan"
	// LabelBase marks plans and profiles that were made after drift. The value is the name of the PlacementPlan that
	// results from the spec of the MoEDeployment.
	LabelBase = "semmoe.io/base"
	// LabelMonitoring, with any value, is set by users on namespaces whose pods may read the metrics of engines and
	// request routers.
	LabelMonitoring = "semmoe.io/monitoring"

	// AnnotationEngine is the engine type of a pod. It is absent on pods with SGLang that an older operator created.
	AnnotationEngine = "semmoe.io/engine"
	// AnnotationEngineOptions is the content of the engine's options file.
	AnnotationEngineOptions = "semmoe.io/engine-options"
	// AnnotationOverlap is the overlap settings of an engine pod, as JSON. It is absent without any.
	AnnotationOverlap = "semmoe.io/overlap"
	// AnnotationOverlapBasis is what the settings of a workload were chosen from with spec.engine.overlap mode Auto, as
	// JSON. It is an annotation of the workload, and changes without a roll-out.
	AnnotationOverlapBasis = "semmoe.io/overlap-basis"
	// AnnotationRanks is the number of ranks that requests to an engine pod can be pinned to.
	AnnotationRanks = "semmoe.io/ranks"
	// AnnotationExpertParallelSize is the number of ranks of an engine pod that serves a plan with attention
	// TensorParallel, where requests have no rank.
	AnnotationExpertParallelSize = "semmoe.io/expert-parallel-size"
	// AnnotationPort is the serving port of an engine pod.
	AnnotationPort = "semmoe.io/port"
	// AnnotationScheme is the URL scheme of an engine pod, http or https. Absent means http.
	AnnotationScheme = "semmoe.io/scheme"
	SchemeHTTPS      = "https"
	// AnnotationRankPorts contains the serving ports of the ranks of an engine pod, in the order of the ranks,
	// separated by commas. It is absent where all ranks share the port in AnnotationPort.
	AnnotationRankPorts = "semmoe.io/rank-ports"
	// AnnotationPodsPerReplica is the number of pods of the replica of an engine pod that receives requests. It is
	// absent for one pod.
	AnnotationPodsPerReplica = "semmoe.io/pods-per-replica"
	// AnnotationModelShape contains the properties of the model that routers need to count activations, as JSON.
	AnnotationModelShape = "semmoe.io/model-shape"
	// AnnotationModelDigest is the full digest of the checkpoint that a revision serves.
	AnnotationModelDigest = "semmoe.io/model-digest"
	// AnnotationServiceAccount is the UID of the ServiceAccount that the pod of a request router was created for.
	AnnotationServiceAccount = "semmoe.io/service-account-uid"
	// AnnotationPlanDigest is the full digest of the plan that a pod was created for, or that a ConfigMap contains.
	AnnotationPlanDigest = "semmoe.io/plan-digest"
	// AnnotationFollowTables is on a pod that receives new tables for the placement of its plan while it serves. The
	// artifact store then lets it read the plans of its namespace.
	AnnotationFollowTables = "semmoe.io/follow-tables"
	// AnnotationRealization is the realization of the plan of an engine pod. Absent means EngineMap.
	AnnotationRealization = "semmoe.io/realization"
	// AnnotationRedundantExperts is the number of slots of each layer of an engine pod beyond one per expert. Absent
	// means 0.
	AnnotationRedundantExperts = "semmoe.io/redundant-experts"
	// AnnotationOutputChanged, followed by a revision, marks a plan under which that revision gave a different output
	// than the model without a plan. The value describes the difference. The pair of plan and revision is not retried
	// until the annotation is removed.
	AnnotationOutputChanged = "output-changed.semmoe.io/"
	// AnnotationFailed, followed by a revision, marks a plan whose canary with that revision was rolled back. The value
	// is the cause. The plan is not retried until the annotation is removed. On a workload, it marks another change of
	// the spec whose canary next to that workload was rolled back.
	AnnotationFailed = "failed.semmoe.io/"
	// AnnotationMeasured, on a plan, contains the time that its canary saved per step of the engine, and the time that
	// its hardware profile predicts, in microseconds, as JSON. The metric semmoe_plan_predicted_over_measured is their
	// ratio.
	AnnotationMeasured = "semmoe.io/measured"
	// AnnotationRollout marks a workload in a roll-out that is not complete: RolloutCanary or RolloutPromoting.
	AnnotationRollout = "semmoe.io/rollout"
	RolloutCanary     = "Canary"
	RolloutPromoting  = "Promoting"
	// AnnotationProven is on a workload that completed a roll-out, or that remained after the roll-out of another one.
	// The value is the time since which it is the only serving workload.
	AnnotationProven = "semmoe.io/proven"
	// AnnotationRecreatedReplicas is on a workload whose replicas have several pods. It lists the replicas that were recreated
	// since they were last ready, as JSON.
	AnnotationRecreatedReplicas = "semmoe.io/remade"
	// AnnotationEngineRelease, on a workload, is the release that the engine reports, or ReleaseUnknown where the
	// engine reports none.
	AnnotationEngineRelease = "semmoe.io/engine-release"
	ReleaseUnknown          = "unknown"
	// LabelQueue is Kueue's label of a queue. It is passed from a MoEDeployment to its profiles, and from a profile to
	// its profiling Job. LabelQueuePriority, its label of a priority class, is passed with it.
	LabelQueue         = "kueue.x-k8s.io/queue-name"
	LabelQueuePriority = "kueue.x-k8s.io/priority-class"
	// AnnotationApprove is the short digest of the plan that a user approves for roll-out, or the revision of another
	// change whose canary proves nothing.
	AnnotationApprove = "semmoe.io/approve"
	// AnnotationRollBack is the short digest of the plan whose roll-out a user ends, on its canary or
	// during its promotion. The plan is not retried until this annotation and AnnotationFailed are removed. For another
	// change it is the revision.
	AnnotationRollBack = "semmoe.io/rollback"
	// AnnotationPlanned, on a profile that was made after drift, is the name of the plan that was made from the
	// profile. If that plan is deleted, no other plan is made from the profile.
	AnnotationPlanned = "semmoe.io/planned"
	// AnnotationReport contains the result of an inspection or a download, on its Job, so that the result outlives the pod of the
	// Job. On the ConfigMap of a plan it contains the evaluation of the plan, so that the evaluation outlives the
	// status of the plan.
	AnnotationReport = "semmoe.io/report"

	// ComponentEngine to ComponentTables are the values of LabelComponent. Every object that the operator creates has
	// one.
	ComponentEngine = "engine"
	// ComponentWorker is the value for the additional pods of a replica with several pods. They receive no requests.
	ComponentWorker = "worker"
	ComponentRouter = "router"
	// ComponentDownload is the value for Jobs that download a checkpoint.
	ComponentDownload = "download"
	ComponentInspect  = "inspect"
	ComponentProfile  = "profile"
	ComponentPlan     = "plan"
	ComponentAnswers  = "answers"
	ComponentTables   = "tables"

	// EngineContainer is the name of the engine container in a serving pod. An entry with that name in
	// spec.template.spec.containers is merged into the container.
	EngineContainer = "engine"

	// ModelMountPath is the mount path of spec.model.volume, read-only, in every pod that reads the checkpoint.
	ModelMountPath = "/models"
	// DatasetVolume is the name of the volume that contains a data set, where the data set is not on the volume of the
	// model.
	DatasetVolume = "dataset"
	// PlanVolume is the name of the volume of a plan's ConfigMap.
	PlanVolume = "semmoe-plan"
	// EngineOptionsVolume is the name of the volume with the options file of an engine that has one. EngineOptionsPath
	// is the path of the file in the engine container. The content of the file is the pod annotation
	// AnnotationEngineOptions.
	EngineOptionsVolume = "semmoe-engine-options"
	EngineOptionsPath   = "/etc/semmoe/engine/options.yaml"
	// EngineTLSVolume is the name of the volume with the certificate of an engine, its key and its authorities, and
	// EngineTLSMountPath is its mount path.
	EngineTLSVolume    = "semmoe-engine-tls"
	EngineTLSMountPath = "/etc/semmoe/engine-tls"
	// PlanMountPath is the mount path of a plan's ConfigMap in the pods that serve the plan.
	PlanMountPath = "/etc/semmoe/plan"
	// TablesVolume is the name of the volume with a complete plan, for an engine that shuffles tokens. TablesMountPath
	// is the mount path of the volume, and TablesPath is the directory of the plan in it. The directory is absent
	// while the artifact store has been unavailable since the pod started.
	TablesVolume    = "semmoe-tables"
	TablesMountPath = "/var/lib/semmoe"
	TablesPath      = "/var/lib/semmoe/plan"
	// TablesInUseVolume is the name of the volume of the ConfigMap with TablesKey in such a pod, and
	// TablesInUseMountPath is its mount path.
	TablesInUseVolume    = "semmoe-tables-in-use"
	TablesInUseMountPath = "/etc/semmoe/tables"
	// TablesVariable, PlacementVariable and PlanDigestVariable are the environment variables that pass to such an
	// engine the path of tables.safetensors, the path of placement.json, and the full digest of the plan.
	TablesVariable     = "SEMMOE_TABLES"
	PlacementVariable  = "SEMMOE_PLACEMENT"
	PlanDigestVariable = "SEMMOE_PLAN_DIGEST"
	// CacheVolume is the name of the volume for permuted copies of the checkpoint, and CacheMountPath is its mount
	// path.
	CacheVolume    = "semmoe-cache"
	CacheMountPath = "/var/cache/semmoe"
	// BaselineOutputsVolume is the name of the volume with the baseline outputs of the model (the outputs without a plan), and
	// AnswersMountPath is its mount path.
	BaselineOutputsVolume    = "semmoe-answers"
	BaselineOutputsMountPath = "/etc/semmoe/answers"
	// TablesKey is a key of the ConfigMap for request routers. The value maps the digest of the plan that pods were
	// created for to the plan whose tables request routers use.
	TablesKey = "tables.json"
	// ServicePort is the port of the Service that clients connect to.
	ServicePort = 8000
	// PickerPort is the ext_proc port of a request router that is an endpoint picker. PickerHealthPort is the port of
	// its gRPC health service.
	PickerPort       = 9002
	PickerHealthPort = 9003
)
