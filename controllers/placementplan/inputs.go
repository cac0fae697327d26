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
	"github.com/semmoe/operator/internal/calibration/machines"
	"github.com/semmoe/operator/internal/engine/registry"
	"github.com/semmoe/operator/internal/owned"
	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/placement"
)

const (
	// solutionFormat is the version of solution.json and of the inputs: a solver that answers the same inputs in another
	// way keeps it, since a plan is never solved again.
	solutionFormat = "semmoe-solution/1"
	// maxSolutionBytes bounds what is read of a solution; the scores of each layer are its longest part.
	maxSolutionBytes = 4 << 20
)

// solveInputs is all that a plan depends on.
type solveInputs struct {
	Format string `json:"format"`
	// Profile is the digest of the profile's result.
	Profile           artifact.Digest     `json:"profile"`
	Ranks             int                 `json:"ranks"`
	Attention         placement.Attention `json:"attention"`
	Algorithm         placement.Algorithm `json:"algorithm"`
	Forecast          solver.Forecast     `json:"forecast"`
	TrainPercent      int                 `json:"trainPercent"`
	Seed              uint64              `json:"seed"`
	TimeBudgetSeconds int                 `json:"timeBudgetSeconds"`
	// PreserveGroups is left out where it is false.
	PreserveGroups bool `json:"preserveGroups,omitempty"`
	// Unshuffled is left out where it is false. Then tokens stay where attention leaves them, and distinct ranks are what is placed for.
	Unshuffled bool `json:"unshuffled,omitempty"`
	// Objective to ExpertLoadLimit are left out where the spec does not say them. RedundantSlots are those of a rank, RedundantMemory is that of a rank
	// from which their number is chosen, the limits are percent.
	Objective       placement.Objective `json:"objective,omitempty"`
	RanksPerNode    int                 `json:"ranksPerNode,omitempty"`
	RedundantSlots  int                 `json:"redundantSlots,omitempty"`
	RedundantMemory int64               `json:"redundantMemory,omitempty"`
	TokenLoadLimit  int                 `json:"tokenLoadLimit,omitempty"`
	ExpertLoadLimit int                 `json:"expertLoadLimit,omitempty"`
	// CopyRule is how the engine chooses among copies of experts; left out where there are none, and where it uses the nearest one.
	CopyRule placement.CopyRule `json:"copyRule,omitempty"`
	// Hardware is the digest of the hardware profile in a ConfigMap, or the name of one that is built in; left out for the operator's own.
	Hardware string `json:"hardware,omitempty"`
	// BatchTokens, or each of ObservedBatchTokens, is a size of batches for which plans are solved and judged; left out where the spec names none.
	BatchTokens         int     `json:"batchTokens,omitempty"`
	ObservedBatchTokens []int32 `json:"observedBatchTokens,omitempty"`
	// MinimumGainPercent judges a plan that replaces none; left out where it is the default.
	MinimumGainPercent *int `json:"minimumGainPercent,omitempty"`
	// Replan is about the plan in service; nil where there is none to compare with.
	Replan *replanInputs `json:"replan,omitempty"`
}

// attentions are the solver's names of the engine's attention parallelism.
var attentions = map[semmoev1.AttentionParallelism]placement.Attention{
	semmoev1.AttentionDataParallel:   placement.DataParallel,
	semmoev1.AttentionTensorParallel: placement.TensorParallel,
}

// objectives are the solver's names of objectives; that of a spec that names none is empty.
var objectives = map[semmoev1.PlacementObjective]placement.Objective{
	semmoev1.ObjectiveTime:         placement.Time,
	semmoev1.ObjectiveActivation:   placement.Activation,
	semmoev1.ObjectiveRankDedup:    placement.RankDedup,
	semmoev1.ObjectiveNodeDedup:    placement.NodeDedup,
	semmoev1.ObjectiveHierarchical: placement.Hierarchical,
}

// resultOf is the digest of a profile's result; empty where it has none yet.
func resultOf(profile *semmoev1.AffinityProfile) artifact.Digest {
	if profile == nil || profile.Status.Result == nil || !meta.IsStatusConditionTrue(profile.Status.Conditions, semmoev1.ConditionReady) {
		return ""
	}
	digest, err := artifact.ParseDigest(profile.Status.Result.Digest)
	if err != nil {
		return "" // a status of another version: its controller is about to write its own
	}
	return digest
}

// inputsOf are the inputs of a plan made from a profile and, where the plan names one, the profile before it, for machines; nil where
// either has no result yet, or where the machines are not known.
func inputsOf(plan *semmoev1.PlacementPlan, profile, prior *semmoev1.AffinityProfile, on machines.Chosen) *solveInputs {
	digest, priorDigest := resultOf(profile), resultOf(prior)
	if digest == "" || plan.Spec.PriorProfileRef != nil && priorDigest == "" {
		return nil
	}
	hardware := cmp.Or(plan.Spec.HardwareDigest, on.Digest)
	switch named := machines.Named(plan.Spec.Hardware); {
	case named == nil:
	case named.ConfigMap == nil:
		hardware = named.BuiltIn
	case hardware == "":
		return nil
	}
	in := &solveInputs{
		Format: solutionFormat, Profile: digest,
		Ranks: int(plan.Spec.ExpertParallelSize), Attention: attentions[plan.Spec.Attention],
		Algorithm: placement.Algorithm(cmp.Or(plan.Spec.Solver.Algorithm, semmoev1.SolverAlgorithm(placement.Auto))), Forecast: solver.Table,
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

// ID names the inputs: the ID of the solution's scope, and the value of a label.
func (i *solveInputs) ID() string { return owned.ShortHash(i, 16) }

// objective is the one that is asked for, or the default: where tokens are not shuffled, activations are as local under any placement.
func (i *solveInputs) objective() placement.Objective {
	if i.Unshuffled {
		return cmp.Or(i.Objective, placement.RankDedup)
	}
	if i.Algorithm != placement.Auto {
		return cmp.Or(i.Objective, placement.Activation)
	}
	return cmp.Or(i.Objective, placement.Time)
}

// minimumGainPercent is what a plan that replaces none must save.
func (i *solveInputs) minimumGainPercent() float64 {
	return float64(ptr.Deref(i.MinimumGainPercent, solver.DefaultMinimumGainPercent))
}

// batchSizes are the sizes of batches of the spec, or the default distribution.
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

// solution is solution.json: which plan the inputs have led to, and what it is worth.
type solution struct {
	Format      string      `json:"format"`
	Inputs      solveInputs `json:"inputs"`
	PlanDigest  string      `json:"planDigest"`
	ModelDigest string      `json:"modelDigest"`
	// FallBack says why the default placement was taken; empty where it was not.
	FallBack string `json:"fallBack,omitempty"`
	// Truncated tells that the time budget cut the search off.
	Truncated     bool        `json:"truncated"`
	TrainRequests int         `json:"trainRequests"`
	TestRequests  int         `json:"testRequests"`
	Seconds       float64     `json:"seconds"`
	Report        cost.Report `json:"report"`
	// UnplannedRemoteRanks is, of tokens that are not shuffled, Report.RemoteRanksPerToken without a plan.
	UnplannedRemoteRanks float64 `json:"unplannedRemoteRanks,omitempty"`
	// LayerNanos and UnplannedLayerNanos are the modelled times of an MoE layer under the plan and without one, and Worth is what they prove; absent
	// where the profile lacks the sizes of the model.
	LayerNanos          int64         `json:"layerNanos,omitempty"`
	UnplannedLayerNanos int64         `json:"unplannedLayerNanos,omitempty"`
	Worth               *solver.Worth `json:"worth,omitempty"`
	// Chosen names the point of the front that became the plan.
	Chosen string `json:"chosen,omitempty"`
	// Copies is how the number of copies was chosen; nil where it was given.
	Copies *solver.Copies `json:"copies,omitempty"`
	// Replan is how the plan compares with the one in service; nil where there is none.
	Replan *replanned `json:"replan,omitempty"`
}

// solved is what the operator keeps of a solution, also where the store is away: on the ConfigMap, as JSON, and in the
// status.
type solved struct {
	PlanDigest  string                 `json:"planDigest"`
	Inputs      string                 `json:"inputs,omitempty"`
	ModelDigest string                 `json:"modelDigest"`
	Verdict     semmoev1.Verdict       `json:"verdict"`
	Forecast    *semmoev1.PlanForecast `json:"forecast"`
	Truncated   bool                   `json:"truncated,omitempty"`
	// RedundantExperts is the number of copies that was chosen, Copies says why; both are empty where the number was given.
	RedundantExperts int32  `json:"redundantExperts,omitempty"`
	Copies           string `json:"copies,omitempty"`
	// Tier and Comparison are those of a plan that is to replace one in service.
	Tier       semmoev1.Tier            `json:"tier,omitempty"`
	Comparison *semmoev1.PlanComparison `json:"comparison,omitempty"`
}

// solved is what to keep of a solution; nil of none.
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
	return kept
}

func solutionScope(namespace, inputs string) artifact.Scope {
	return artifact.Scope{Namespace: namespace, Kind: artifact.Plan, ID: inputs}
}

// fetchSolution reads the solution of inputs; nil where there is none, or it is damaged: it is solved again then.
func fetchSolution(ctx context.Context, client *artifact.Client, namespace, inputs string) (*solution, error) {
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
		return nil, fmt.Errorf("solution of the inputs %s: %w", inputs, err)
	}
	s := &solution{}
	if err := json.Unmarshal(text, s); err != nil {
		return nil, fmt.Errorf("solution of the inputs %s: %w", inputs, err)
	}
	if s.Format != solutionFormat || s.Inputs.ID() != inputs {
		return nil, fmt.Errorf("solution of the inputs %s: it has format %q and is of the inputs %s", inputs, s.Format, s.Inputs.ID())
	}
	if _, err := artifact.ParseDigest(s.PlanDigest); err != nil {
		return nil, fmt.Errorf("solution of the inputs %s: %w", inputs, err)
	}
	return s, nil
}

// publishSolution makes a solution that of its inputs. lost is the one that was published before for another plan, which
// is not in the store any more; nil where there was none.
func publishSolution(ctx context.Context, client *artifact.Client, namespace string, s, lost *solution) error {
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
				return fmt.Errorf("delete the solution of a lost plan: %w", err)
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
		return fmt.Errorf("publish the solution: %w", err)
	}
	return nil
}
