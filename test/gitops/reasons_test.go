package gitops

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/util/sets"

	"github.com/semmoe/operator/test/reasons"
)

// Every reason that the source gives a condition has been seen in an object, or is listed with what keeps it from that.
func TestReasonsHaveStates(t *testing.T) {
	for _, k := range kinds(t) {
		kind, ours := strings.CutPrefix(k.Name, "semmoe.io/")
		if !ours || !slices.Contains(reasons.Kinds, kind) {
			continue // another project's
		}
		t.Run(k.Name, func(t *testing.T) {
			declared, err := reasons.Of(filepath.Join("..", ".."), kind)
			if err != nil {
				t.Fatal(err)
			}
			seen := sets.New[string]()
			for _, u := range k.States {
				seen = seen.Union(Reasons(u))
			}
			excused := sets.KeySet(unseen[k.Name])
			if missing := sets.List(declared.Difference(seen).Difference(excused)); len(missing) > 0 {
				t.Errorf("no state has the reasons %v: docs/gitops.md says how to collect one", missing)
			}
			if needless := sets.List(excused.Intersection(seen).Union(excused.Difference(declared))); len(needless) > 0 {
				t.Errorf("the reasons %v need no excuse: a state has them, or nothing gives them", needless)
			}
		})
	}
}

// unseen are the reasons that no state has, and what keeps the end-to-end suite from seeing one.
var unseen = map[string]map[string]string{
	"semmoe.io/MoEDeployment": {
		"BatchSizesChanged":    "the engines' steps must double or halve while a plan is in service, as in the story of batch sizes; its state is not collected yet",
		"MetricsUnreadable":    "status.batchTokens has it; no condition does",
		"NoMetric":             "status.batchTokens has it; no condition does",
		"NotReported":          "status.batchTokens has it; no condition does",
		"TooFewSteps":          "status.batchTokens has it; no condition does",
		"ReplanCooldown":       "a plan must have been in use for long, and a re-plan of it have come to nothing within the cooldown",
		"DatasetUnchanged":     "the traffic must have drifted while spec.profiling.refresh is Job",
		"DriftEnded":           "the traffic must come back before a profile of it is complete",
		"TablesRequireRestart": "an engine that shuffles tokens must have been re-planned for",
		"FailedMount":          "it is an event's; the condition says VolumeNotMounted",
		"InspectionFailed":     "the inspection must end in an error of the machine, not of the checkpoint",
		"LocalityDoesNotPay":   "no placement that is solved without one in service has this verdict; the PlacementPlan of a re-plan tells it",
		"NoDataset":            "the schema refuses refresh Job without a data set",
		"NodeLost":             "the node of the suite is one with the cluster; test/installation loses one",
		"NotEvaluated":         "the first look at a MoEDeployment must fail half-way",
		"TablesNotLoaded":      "the routers must serve, and not have loaded the tables of the plan in service yet",
		"NoTrafficSamples":     "a Prometheus server must tell of drift while spec.routing.samplePercent is 0",
		"LayoutMismatch":       "spec.placement must ask for other copies than a plan in service has, and its traffic drift",
		"RanksIgnored":         "an engine must ignore the rank of requests, as in the story of that; its state is not collected yet",
		"TiedEmbeddings":       "SGLang must be told to serve a checkpoint that ties its embeddings, as in the story of that; its state is not collected yet",
		"RoutersUnreachable":   "all request routers must be away while a plan is in service, and drift be looked at",
		"SecretUnreadable":     "the API server must fail while it is asked for one Secret alone",
		"UnknownEngine":        "the schema knows the engines",
	},
	"semmoe.io/AffinityProfile": {
		"FailedMount":      "it is an event's; the condition says VolumeNotMounted",
		"InspectionFailed": "the inspection must end in an error of the machine, not of the inputs",
		"NodeLost":         "the node of the suite is one with the cluster; test/installation loses one",
		"NotReady":         "a container of a profiling Job must start, and then fail its readiness probe for a minute",
		"ProfilingFailed":  "a Job must end in an error that is neither its inputs' nor its engine's",
		"UnknownEngine":    "the schema knows the engines",
		"Queued":           "two profiles of live samples must be complete within the second that one is read in",
	},
	"semmoe.io/PlacementPlan": {
		"ArtifactsLost":           "it is told for as long as a lost plan is being solved again",
		"InvalidPlacement":        "the conditions are those of InvalidExpertParallelSize, but for this word",
		"PlanUnusable":            "the map of a plan must be larger than a ConfigMap may be",
		"ProfileInvalid":          "the store must hold a profile that no release has written",
		"StableConfigMapOutdated": "a lost plan must be solved again as another one",
	},
}
