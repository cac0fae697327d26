package v1alpha1

// Labels and annotations that the operator sets on the objects it creates. Keys under semmoe.io/ are reserved for it.
const (
	// LabelDeployment names the MoEDeployment that an object belongs to.
	LabelDeployment = "semmoe.io/deployment"
	// LabelComponent is the part that a pod plays: engine, router or inspect.
	LabelComponent = "semmoe.io/component"
	// LabelRevision is the revision of the serving workload: a short hash of template, engine, parallelism and model.
	LabelRevision = "semmoe.io/revision"
	// LabelInputs is the short hash of the inputs of an inspection Job.
	LabelInputs = "semmoe.io/inputs"

	// AnnotationRanks is the number of ranks that requests to an engine pod can be pinned to.
	AnnotationRanks = "semmoe.io/ranks"
	// AnnotationPort is the port on which an engine pod serves.
	AnnotationPort = "semmoe.io/port"
	// AnnotationModelShape is what routers must know of the model to count activations, as JSON.
	AnnotationModelShape = "semmoe.io/model-shape"
	// AnnotationModelDigest is the full digest of the checkpoint that a revision serves.
	AnnotationModelDigest = "semmoe.io/model-digest"
	// AnnotationServiceAccount is the UID of the ServiceAccount that a request router's pod was made for.
	AnnotationServiceAccount = "semmoe.io/service-account-uid"
	// AnnotationReport is the inspection's result, kept on its Job so that it outlives the Job's pod.
	AnnotationReport = "semmoe.io/report"

	// ComponentEngine, ComponentRouter and ComponentInspect are the values of LabelComponent.
	ComponentEngine  = "engine"
	ComponentRouter  = "router"
	ComponentInspect = "inspect"

	// EngineContainer is the name of the engine's container in a serving pod: an entry of that name in
	// spec.template.spec.containers is merged into it.
	EngineContainer = "engine"

	// ModelMountPath is where spec.model.volume is mounted, read-only, in every pod that reads the checkpoint.
	ModelMountPath = "/models"
	// ServicePort is the port of the Service that clients talk to.
	ServicePort = 8000
)
