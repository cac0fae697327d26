// SPDX-License-Identifier: Apache-2.0

package gitops

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/util/sets"

	"github.com/semmoe/operator/test/reasons"
)

// TestReasonsHaveStates checks that a recorded object has each condition reason in the source code, or that unseen
// lists the reason.
func TestReasonsHaveStates(t *testing.T) {
	for _, k := range kinds(t) {
		kind, ours := strings.CutPrefix(k.Name, "semmoe.io/")
		if !ours || !slices.Contains(reasons.Kinds, kind) {
			continue // a kind of another project
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
				t.Errorf("no state has the reasons %v: see docs/gitops.md for how to collect one", missing)
			}
			if needless := sets.List(excused.Intersection(seen).Union(excused.Difference(declared))); len(needless) > 0 {
				t.Errorf("remove the reasons %v from unseen: a state has them, or the source code does not declare them", needless)
			}
		})
	}
}

// unseen contains the reasons that no recorded state has, with the requirement that the end-to-end suite does not meet.
var unseen = map[string]map[string]string{
	"semmoe.io/MoEDeployment": {
		"BatchSizesChanged":    "the batch size of engine steps must double or halve while a plan is in service; the end-to-end test of batch sizes does not record this state yet",
		"ChangeRolledBack":     "the times of a changed revision must be compared for minutes; the end-to-end test of changes does not record this state yet",
		"MetricsUnreadable":    "a reason in status.batchTokens, not in a condition",
		"NoMetric":             "a reason in status.batchTokens, not in a condition",
		"NotReported":          "a reason in status.batchTokens, not in a condition",
		"Overlapping":          "a reason in status.overlap, not in a condition",
		"OverlapNotModelled":   "a reason in status.overlap, not in a condition",
		"TooFewSteps":          "a reason in status.batchTokens, not in a condition",
		"ReplanCooldown":       "a plan must be in service for long, and a re-plan without effect must be within the cooldown",
		"CountersInvalid":      "an engine that shuffles tokens must report counters that cannot be true",
		"DatasetUnchanged":     "the traffic must drift while spec.profiling.refresh is Job",
		"Downloading":          "a MoEDeployment must have spec.model.source; the end-to-end test of downloads does not record this state yet",
		"DownloadFailed":       "a download must fail; the end-to-end test of downloads does not record this state yet",
		"DriftEnded":           "the drift must end before the new profile is complete",
		"TablesRequireRestart": "an earlier version of the operator must have created pods that shuffle tokens, and their tables must be replaced",
		"InspectionFailed":     "the inspection must end in an error of the machine, not of the checkpoint",
		"ModelNotProfilable":   "the model must have an unknown type; the end-to-end suite serves none yet",
		"LocalityDoesNotPay":   "a plan without a predecessor never has this verdict; the PlacementPlan of a re-plan reports it",
		"NoDataset":            "the schema refuses refresh Job without a data set",
		"NodeLost":             "the suite has one node, which also runs the control plane; test/installation covers a lost node",
		"NotEvaluated":         "the first reconciliation of a MoEDeployment must fail half-way",
		"TablesNotLoaded":      "the routers must serve before they load the tables of the plan in service",
		"NoTrafficSamples":     "a Prometheus server must report drift while spec.routing.samplePercent is 0",
		"LayoutMismatch":       "spec.placement must request other copies than the plan in service has, and the traffic must drift",
		"RanksIgnored":         "an engine must ignore the rank of requests; the end-to-end test of ignored ranks does not record this state yet",
		"TiedEmbeddings":       "SGLang must serve a checkpoint with tied embeddings; the end-to-end test of tied embeddings does not record this state yet",
		"RoutersUnreachable":   "all request routers must be unreachable while a plan is in service and drift is assessed",
		"SecretUnreadable":     "the API server must fail for reads of one Secret only",
		"UnknownEngine":        "the schema refuses unknown engines",
	},
	"semmoe.io/AffinityProfile": {
		"InspectionFailed":   "the inspection must end in an error of the machine, not of the inputs",
		"ModelNotProfilable": "the model must have an unknown type; the end-to-end suite serves none yet",
		"NodeLost":           "the suite has one node, which also runs the control plane; test/installation covers a lost node",
		"NotReady":           "a container of a profiling Job must start, and then fail its readiness probe for a minute",
		"ProfilingFailed":    "a Job must fail with an error that neither its inputs nor its engine cause",
		"UnknownEngine":      "the schema refuses unknown engines",
		"Queued":             "two profiles of live samples must complete within the same second, while one is read",
	},
	"semmoe.io/PlacementPlan": {
		"ArtifactsLost":           "a transient reason while a lost plan is solved again",
		"ForecastUnavailable":     "the conditions differ from those of InvalidExpertParallelSize only in the reason",
		"InvalidPlacement":        "the conditions differ from those of InvalidExpertParallelSize only in the reason",
		"PlanUnusable":            "the map of a plan must be larger than a ConfigMap may be",
		"ProfileInvalid":          "the store must hold a profile that no release has written",
		"StableConfigMapOutdated": "a lost plan must be solved again with another result",
	},
}
