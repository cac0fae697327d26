// SPDX-License-Identifier: Apache-2.0

package placementplan

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/utils/ptr"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/artifact/access"
	"github.com/semmoe/operator/internal/calibration/machines"
	"github.com/semmoe/operator/internal/engine/registry"
	"github.com/semmoe/operator/internal/kube/ownership"
	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/placement"
)

const (
	// solutionFormat is the version of solution.json and of the inputs. A solver that returns another result for the
	// same inputs keeps the version, because a plan is never solved again.
	solutionFormat = "semmoe-solution/1"
	// maxSolutionBytes bounds the size of a solution. The scores of each layer are its largest part.
	maxSolutionBytes = 4 << 20
)

// solveInputs contains all inputs that determine a plan. Its JSON encoding is hashed: fields are omitted at their
// defaults, so that new fields do not change the ID of existing inputs.
type solveInputs struct {
	Format string `json:"format"`
	// Profile is the digest of the result of the profile.
	Profile           artifact.Digest     `json:"profile"`
	Ranks             int                 `json:"ranks"`
	Attention         placement.Attention `json:"attention"`
	Algorithm         placement.Algorithm `json:"algorithm"`
	Forecast          solver.Forecast     `json:"forecast"`
	TrainPercent      int                 `json:"trainPercent"`
	Seed              uint64              `json:"seed"`
	TimeBudgetSeconds int                 `json:"timeBudgetSeconds"`
	// PreserveGroups is omitted if false.
	PreserveGroups bool `json:"preserveGroups,omitempty"`
	// Unshuffled is omitted if false. If true, tokens stay on the ranks that attention assigns, and the placement
	// minimizes remote ranks.
	Unshuffled bool `json:"unshuffled,omitempty"`
	// Objective to ExpertLoadLimit are omitted if the spec does not set them. RedundantSlots is the number of redundant
	// slots of a rank. RedundantMemory is the memory of a rank from which this number is chosen, in bytes. The limits
	// are in percent.
	Objective       placement.Objective `json:"objective,omitempty"`
	RanksPerNode    int                 `json:"ranksPerNode,omitempty"`
	RedundantSlots  int                 `json:"redundantSlots,omitempty"`
	RedundantMemory int64               `json:"redundantMemory,omitempty"`
	TokenLoadLimit  int                 `json:"tokenLoadLimit,omitempty"`
	ExpertLoadLimit int                 `json:"expertLoadLimit,omitempty"`
	// CopyRule is the rule by which the engine chooses among the copies of an expert. It is omitted without copies, and
	// if the engine uses the nearest copy.
	CopyRule placement.CopyRule `json:"copyRule,omitempty"`
	// Hardware is the digest of the hardware profile in a ConfigMap, or the name of a built-in profile. It is omitted
	// for the default profile.
	Hardware string `json:"hardware,omitempty"`
	// BatchTokens, or each element of ObservedBatchTokens, is a batch size for which plans are solved and evaluated.
	// Both are omitted if the spec sets none.
	BatchTokens         int     `json:"batchTokens,omitempty"`
	ObservedBatchTokens []int32 `json:"observedBatchTokens,omitempty"`
	// MinimumGainPercent is the threshold of a plan that replaces no other plan. It is omitted at its default.
	MinimumGainPercent *int `json:"minimumGainPercent,omitempty"`
	// Replan contains the inputs of a comparison with the plan in service; nil without one.
	Replan *replanInputs `json:"replan,omitempty"`
}

// attentions maps the attention parallelism of the engine to the names of the solver.
var attentions = map[semmoev1.AttentionParallelism]placement.Attention{
	semmoev1.AttentionDataParallel:   placement.DataParallel,
	semmoev1.AttentionTensorParallel: placement.TensorParallel,
}

// objectives maps objectives to the names of the solver. A spec without objective maps to the empty string.
var objectives = map[semmoev1.PlacementObjective]placement.Objective{
	semmoev1.ObjectiveTime:         placement.Time,
	semmoev1.ObjectiveActivation:   placement.Activation,
	semmoev1.ObjectiveRankDedup:    placement.RankDedup,
	semmoev1.ObjectiveNodeDedup:    placement.NodeDedup,
	semmoev1.ObjectiveHierarchical: placement.Hierarchical,
}

// forecasts maps forecasts to the names of the solver, except Auto.
var forecasts = map[semmoev1.SolverForecast]solver.Forecast{
	semmoev1.ForecastTable:      solver.Table,
	semmoev1.ForecastTransition: solver.Transition,
	semmoev1.ForecastLookBack:   solver.LookBack,
	semmoev1.ForecastLookAhead:  solver.LookAhead,
}

// forecastFor returns the forecast of the plan's tables. No engine reads the tables of single tokens unless it shuffles
// tokens.
func forecastFor(plan *semmoev1.PlacementPlanSpec) solver.Forecast {
	if attentions[plan.Attention] != placement.TensorParallel || plan.TokenShuffle == semmoev1.TokenShuffleDisabled {
		return solver.Table
	}
	return cmp.Or(forecasts[plan.Solver.Forecast], solver.AutoForecast)
}

// methodOf returns the name of a forecast in the API.
func methodOf(by solver.Forecast) semmoev1.SolverForecast {
	for name, f := range forecasts {
		if f == by {
			return name
		}
	}
	return semmoev1.ForecastTable
}

// forecastUnavailable returns the error for a forecast that cannot be computed from the profile.
func forecastUnavailable(by solver.Forecast, err error) *invalidError {
	return invalidf("ForecastUnavailable", "spec.solver.forecast: %s is unavailable: %v. The spec is immutable: create another plan with forecast Auto or Table, or from another profile", methodOf(by), err)
}

// resultOf returns the digest of the result of a profile, or the empty string if there is no result yet.
func resultOf(profile *semmoev1.AffinityProfile) artifact.Digest {
	if profile == nil || profile.Status.Result == nil || !meta.IsStatusConditionTrue(profile.Status.Conditions, semmoev1.ConditionReady) {
		return ""
	}
	digest, err := artifact.ParseDigest(profile.Status.Result.Digest)
	if err != nil {
		return "" // it was written by another version: its controller is about to overwrite it
	}
	return digest
}

// inputsOf returns the inputs of a plan that is made from profile and, if the spec names one, from prior, for the
// hardware profile on. It returns nil while one of the profiles has no result, or the hardware profile is unknown.
func inputsOf(plan *semmoev1.PlacementPlan, profile, prior *semmoev1.AffinityProfile, on machines.ResolvedProfile) *solveInputs {
	digest, priorDigest := resultOf(profile), resultOf(prior)
	if digest == "" || plan.Spec.PriorProfileRef != nil && priorDigest == "" {
		return nil
	}
	hardware := cmp.Or(plan.Spec.HardwareDigest, on.Digest)
	switch named := machines.ReferenceForPlan(plan.Spec.Hardware); {
	case named == nil:
	case named.ConfigMap == nil:
		hardware = named.BuiltIn
	case hardware == "":
		return nil
	}
	in := &solveInputs{
		Format: solutionFormat, Profile: digest,
		Ranks: int(plan.Spec.ExpertParallelSize), Attention: attentions[plan.Spec.Attention],
		Algorithm: placement.Algorithm(cmp.Or(plan.Spec.Solver.Algorithm, semmoev1.SolverAlgorithm(placement.Auto))), Forecast: forecastFor(&plan.Spec),
		TrainPercent: int(plan.Spec.Solver.TrainPercent), Seed: uint64(ptr.Deref(plan.Spec.Solver.Seed, 1)),
		TimeBudgetSeconds: int(plan.Spec.Solver.TimeBudgetSeconds),
		PreserveGroups:    plan.Spec.Realization == semmoev1.RealizationReshuffledWeights,
		Unshuffled:        plan.Spec.TokenShuffle == semmoev1.TokenShuffleDisabled,
		Objective:         objectives[plan.Spec.Objective],
		RanksPerNode:      int(plan.Spec.RanksPerNode),
		RedundantSlots:    int(plan.Spec.FixedRedundantExperts() / plan.Spec.ExpertParallelSize),
		RedundantMemory:   plan.Spec.RedundantMemory(),
		TokenLoadLimit:    int(ptr.Deref(plan.Spec.TokenLoadLimitPercent, 0)),
		ExpertLoadLimit:   int(ptr.Deref(plan.Spec.ExpertLoadLimitPercent, 0)),
		Hardware:          hardware,
		CopyRule:          copyRule(plan),
		BatchTokens:       int(plan.Spec.BatchTokens), ObservedBatchTokens: plan.Spec.ObservedBatchTokens,
		Replan: replanInputsOf(plan, priorDigest),
	}
	if in.Replan == nil {
		if gain := plan.Spec.MinimumGainPercent; gain != nil && *gain != solver.DefaultMinimumGainPercent {
			in.MinimumGainPercent = ptr.To(int(*gain))
		}
	}
	return in
}

// copyRule returns the rule of the plan's engine for copies of experts. Rules are known for attention data parallelism.
func copyRule(plan *semmoev1.PlacementPlan) placement.CopyRule {
	adapter, err := registry.For(string(plan.Spec.Engine))
	if err != nil || plan.Spec.FixedRedundantExperts() == 0 && plan.Spec.RedundantMemory() == 0 || attentions[plan.Spec.Attention] != placement.DataParallel {
		return placement.NearestCopy
	}
	return adapter.CopyRule
}

// ID returns the hash of the inputs. It is the ID of the scope of the solution, and the value of a label.
func (i *solveInputs) ID() string { return ownership.ShortHash(i, 16) }

// objective returns the objective of the spec, or the default. Without token shuffle the local share is the same under
// any placement, so the default is then RankDedup.
func (i *solveInputs) objective() placement.Objective {
	if i.Unshuffled {
		return cmp.Or(i.Objective, placement.RankDedup)
	}
	if i.Algorithm != placement.Auto {
		return cmp.Or(i.Objective, placement.Activation)
	}
	return cmp.Or(i.Objective, placement.Time)
}

// minimumGainPercent returns the minimum gain of a plan that replaces no other plan.
func (i *solveInputs) minimumGainPercent() float64 {
	return float64(ptr.Deref(i.MinimumGainPercent, solver.DefaultMinimumGainPercent))
}

// batchSizes returns the batch sizes of the spec, or the default distribution.
func (i *solveInputs) batchSizes() []int {
	if i.BatchTokens > 0 {
		return []int{i.BatchTokens}
	}
	if len(i.ObservedBatchTokens) == 0 {
		return solver.DefaultBatchTokens
	}
	sizes := make([]int, len(i.ObservedBatchTokens))
	for n, tokens := range i.ObservedBatchTokens {
		sizes[n] = int(tokens)
	}
	return sizes
}

func (i *solveInputs) options(progress func(step string, done, total int)) solver.Options {
	return solver.Options{
		BatchTokens: i.batchSizes(), Objective: i.objective(), RanksPerNode: i.RanksPerNode, Unshuffled: i.Unshuffled, RedundantSlots: i.RedundantSlots,
		RedundantMemory: i.RedundantMemory, CopyRule: i.CopyRule,
		Constraints: placement.Constraints{TokenLoadLimit: float64(i.TokenLoadLimit), ExpertLoadLimit: float64(i.ExpertLoadLimit)},
		Ranks:       i.Ranks, Attention: i.Attention, Algorithm: i.Algorithm, Forecast: i.Forecast,
		TrainPercent: i.TrainPercent, Seed: i.Seed, TimeBudget: time.Duration(i.TimeBudgetSeconds) * time.Second, Progress: progress,
		PreserveGroups: i.PreserveGroups,
	}
}

// solution is the content of solution.json: the plan that was solved from the inputs, and its evaluation.
type solution struct {
	Format      string      `json:"format"`
	Inputs      solveInputs `json:"inputs"`
	PlanDigest  string      `json:"planDigest"`
	ModelDigest string      `json:"modelDigest"`
	// FallBack is the reason for which the default placement was used; empty if it was not.
	FallBack string `json:"fallBack,omitempty"`
	// Truncated is true if the time budget stopped the search.
	Truncated     bool        `json:"truncated"`
	TrainRequests int         `json:"trainRequests"`
	TestRequests  int         `json:"testRequests"`
	Seconds       float64     `json:"seconds"`
	Report        cost.Report `json:"report"`
	// UnplannedRemoteRanks is Report.RemoteRanksPerToken without a plan, if tokens are not shuffled.
	UnplannedRemoteRanks float64 `json:"unplannedRemoteRanks,omitempty"`
	// LayerNanos and UnplannedLayerNanos are the modelled times of an MoE layer with the plan and without it. Worth is
	// their comparison. They are absent if the profile lacks the sizes of the model.
	LayerNanos          int64         `json:"layerNanos,omitempty"`
	UnplannedLayerNanos int64         `json:"unplannedLayerNanos,omitempty"`
	Worth               *solver.Worth `json:"worth,omitempty"`
	// BatchRates are the local activation rates by batch size; nil where they do not depend on it.
	BatchRates []solver.BatchRate `json:"batchRates,omitempty"`
	// Chosen identifies the point of the Pareto front that became the plan.
	Chosen string `json:"chosen,omitempty"`
	// Copies records how the number of copies was chosen; nil if the spec sets it.
	Copies *solver.Copies `json:"copies,omitempty"`
	// Neighbours records whether the tables score unseen tokens by their neighbours; nil without token embeddings.
	Neighbours *solver.NeighbourTrial `json:"neighbours,omitempty"`
	// Forecast is the forecast of the plan's tables. It is absent for plans of earlier versions, which have forecast
	// table. Forecasts is the comparison by which it was chosen; nil if the spec names it.
	Forecast  solver.Forecast        `json:"forecast,omitempty"`
	Forecasts *solver.ForecastChoice `json:"forecasts,omitempty"`
	// Replan is the comparison with the plan in service; nil without one.
	Replan *replanned `json:"replan,omitempty"`
}

// solved is the part of a solution that the operator keeps when the store is unavailable: as JSON in an annotation of
// the ConfigMap, and in the status.
type solved struct {
	PlanDigest  string                 `json:"planDigest"`
	Inputs      string                 `json:"inputs,omitempty"`
	ModelDigest string                 `json:"modelDigest"`
	Verdict     semmoev1.Verdict       `json:"verdict"`
	Forecast    *semmoev1.PlanForecast `json:"forecast"`
	Truncated   bool                   `json:"truncated,omitempty"`
	// RedundantExperts is the chosen number of copies, and Copies is the reason for it. Both are empty if the spec sets
	// the number.
	RedundantExperts int32  `json:"redundantExperts,omitempty"`
	Copies           string `json:"copies,omitempty"`
	// Neighbours is the result of the comparison of tables with and without neighbours; empty without token embeddings.
	Neighbours string `json:"neighbours,omitempty"`
	// Forecasts is the result of the comparison of forecasts; empty if the spec names one.
	Forecasts string `json:"forecasts,omitempty"`
	// Tier and Comparison are set for a plan that replaces a plan in service.
	Tier       semmoev1.Tier            `json:"tier,omitempty"`
	Comparison *semmoev1.PlanComparison `json:"comparison,omitempty"`
}

// solved returns the part of a solution to keep; nil for nil.
func (s *solution) solved() *solved {
	if s == nil {
		return nil
	}
	kept := &solved{
		PlanDigest: s.PlanDigest, Inputs: s.Inputs.ID(), ModelDigest: s.ModelDigest, Verdict: verdictOf(s), Forecast: forecastOf(s), Truncated: s.Truncated,
		Tier: s.Replan.tier(), Comparison: s.Replan.comparison(),
	}
	if s.Copies != nil {
		kept.RedundantExperts, kept.Copies = int32(s.Copies.Chosen*s.Inputs.Ranks), s.Copies.Text()
	}
	if s.Neighbours != nil {
		kept.Neighbours = s.Neighbours.Text()
	}
	if s.Forecasts != nil {
		kept.Forecasts = s.Forecasts.Text()
	}
	return kept
}

func solutionScope(namespace, inputs string) artifact.Scope {
	return artifact.Scope{Namespace: namespace, Kind: artifact.Plan, ID: inputs}
}

// fetchSolution reads the solution of inputs. It returns nil if there is none or it is damaged; the inputs are then
// solved again.
func fetchSolution(ctx context.Context, client *access.Client, namespace, inputs string) (*solution, error) {
	scope := solutionScope(namespace, inputs)
	digest, err := client.Published(ctx, scope)
	if errors.Is(err, artifact.ErrNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	text, err := client.ReadAll(ctx, scope, digest, maxSolutionBytes)
	if errors.Is(err, artifact.ErrNotFound) || errors.Is(err, artifact.ErrCorrupt) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("failed to read the solution of inputs %s: %w", inputs, err)
	}
	s := &solution{}
	if err := json.Unmarshal(text, s); err != nil {
		return nil, fmt.Errorf("failed to read the solution of inputs %s: %w", inputs, err)
	}
	if s.Format != solutionFormat || s.Inputs.ID() != inputs {
		return nil, fmt.Errorf("solution of inputs %s is invalid: it has format %q and inputs %s", inputs, s.Format, s.Inputs.ID())
	}
	if _, err := artifact.ParseDigest(s.PlanDigest); err != nil {
		return nil, fmt.Errorf("failed to read the solution of inputs %s: %w", inputs, err)
	}
	return s, nil
}

// publishSolution publishes a solution for its inputs. lost is the solution that was published earlier and whose plan
// is no longer in the store; nil if there was none.
func publishSolution(ctx context.Context, client *access.Client, namespace string, s, lost *solution) error {
	scope := solutionScope(namespace, s.Inputs.ID())
	if lost != nil && lost.PlanDigest == s.PlanDigest {
		return nil
	}
	if lost != nil {
		artifacts, err := client.List(ctx, scope)
		if err != nil {
			return err
		}
		for _, a := range artifacts {
			if err := client.Delete(ctx, a); err != nil && !errors.Is(err, artifact.ErrNotFound) {
				return fmt.Errorf("failed to delete the solution of a lost plan: %w", err)
			}
		}
	}
	text, err := json.Marshal(s)
	if err != nil {
		return err
	}
	digest, err := client.Put(ctx, scope, bytes.NewReader(text))
	if err == nil {
		_, err = client.Publish(ctx, scope, digest)
	}
	if err != nil {
		return fmt.Errorf("failed to publish the solution: %w", err)
	}
	return nil
}
