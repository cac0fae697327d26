package placementplan

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"runtime/debug"
	"time"

	"github.com/go-logr/logr"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/internal/plan/bundle"
	"github.com/semmoe/operator/internal/profile"
	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/cost/hardware"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

const (
	// maxTraceBytes bounds an uncompressed trace. It is above the largest sample that a profile takes of any known model
	// at the default settings by a factor of ten.
	maxTraceBytes = 4 << 30
	// memoryPerTrace is the memory that a manager needs for each byte of a trace: nine were measured while it is solved.
	// A manager that is killed for its memory would be killed again by the same plan.
	memoryPerTrace = 16
	// maxTokenizerBytes bounds a tokenizer; the largest known ones have about 35 MB.
	maxTokenizerBytes = 256 << 20
)

// invalidError is a fault of the inputs: solving again cannot help.
type invalidError struct{ reason, message string }

func (e *invalidError) Error() string { return e.message }

func invalidf(reason, format string, args ...any) *invalidError {
	return &invalidError{reason, fmt.Sprintf(format, args...)}
}

// invalidRanks names the field of an EP size that does not divide the experts.
func invalidRanks(err error) *invalidError {
	return invalidf("InvalidExpertParallelSize", "spec.expertParallelSize: %v; the spec cannot be changed: create another plan", err)
}

// task is one plan to solve and publish.
type task struct {
	client *artifact.Client
	scope  artifact.Scope // of the profile
	prior  artifact.Scope // of the profile of the plan in service, where the inputs name one
	engine semmoev1.EngineType
	inputs solveInputs
	// machines is the hardware profile that the inputs name; nil for the operator's own.
	machines *hardware.Profile
	now      func() time.Time
	// memory is how many bytes of the process's memory it may take.
	memory int64
}

// run solves the plan and publishes it, unless another plan of the same inputs has been published meanwhile.
func (t *task) run(ctx context.Context, tell func(step string, done, total int)) error {
	log := logr.FromContextOrDiscard(ctx)
	namespace := t.scope.Namespace
	known, err := fetchSolution(ctx, t.client, namespace, t.inputs.ID())
	if err != nil {
		return err
	}
	if known != nil {
		if complete, err := bundle.Complete(ctx, t.client, namespace, known.PlanDigest); err != nil || complete {
			return err
		}
	}
	begin := t.now()
	tell("Reading the profile", 0, 1)
	manifest, err := profile.FetchManifest(ctx, t.client, t.scope, t.inputs.Profile)
	if err != nil {
		return fmt.Errorf("read the profile: %w", err)
	}
	// A trace and the tables made from it can be hundreds of megabytes, and the next solve may be days away.
	defer debug.FreeOSMemory()
	found, replan, err := t.find(ctx, manifest, tell)
	if err != nil {
		return err
	}
	tell("Publishing", 0, 1)
	encoded, err := plan.Encode(found.Plan)
	if err != nil {
		return err
	}
	if _, err := dataOf(encoded, t.engine); err != nil {
		return err
	}
	tokenizer, err := t.tokenizer(ctx, manifest)
	if err != nil {
		return err
	}
	if err := bundle.Publish(ctx, t.client, namespace, encoded, tokenizer); err != nil {
		return err
	}
	result := &solution{
		Format: solutionFormat, Inputs: t.inputs, PlanDigest: encoded.Digest, ModelDigest: manifest.ModelDigest,
		FallBack: found.FallBack, Truncated: found.Truncated, TrainRequests: found.TrainRequests, TestRequests: found.TestRequests,
		Seconds: t.now().Sub(begin).Seconds(), Report: found.Report, Replan: replan,
	}
	if found.Unplanned != nil {
		result.UnplannedRemoteRanks = found.Unplanned.RemoteRanksPerToken
	}
	if w := found.Worth; w != nil {
		result.LayerNanos, result.UnplannedLayerNanos, result.Worth = nanos(w.LayerUS), nanos(w.BaselineLayerUS), w
	}
	result.Chosen, result.Copies = found.Plan.Chosen, found.Plan.Copies
	if err := publishSolution(ctx, t.client, namespace, result, known); err != nil {
		return err
	}
	log.Info("Solved a plan", "namespace", namespace, "plan", encoded.Digest, "inputs", t.inputs.ID(), "seconds", result.Seconds,
		"lar", result.Report.LAR, "baseline", result.Report.BaselineLAR, "truncated", result.Truncated)
	return nil
}

// memoryShare is a task's part of the process's memory limit where so many are solved at a time: together they must fit.
func memoryShare(workers int) int64 { return debug.SetMemoryLimit(-1) / int64(max(1, workers)) }

// traceBound is the largest uncompressed trace that fits a limit on memory in bytes.
func traceBound(memoryLimit int64) int64 { return min(maxTraceBytes, memoryLimit/memoryPerTrace) }

// find solves a plan alone, or one that is to replace the one in service.
func (t *task) find(ctx context.Context, manifest profile.Manifest, tell func(step string, done, total int)) (*solver.Solution, *replanned, error) {
	if t.inputs.Replan != nil {
		return t.replan(ctx, manifest, tell)
	}
	if !manifest.HasTrace() {
		return nil, nil, invalidf("ProfileInvalid", "the profile is of live counts, and has no routing trace: a plan of its own cannot be made from it; give spec.current, or make a profile of a data set or of sequences")
	}
	found, err := t.solve(ctx, manifest, tell)
	return found, nil, err
}

// solve reads the trace and solves. Only the plan and its score outlive it.
func (t *task) solve(ctx context.Context, manifest profile.Manifest, tell func(step string, done, total int)) (*solver.Solution, error) {
	recorded, err := t.recorded(ctx, t.scope, manifest, traceBound(t.memory))
	if err != nil {
		return nil, err
	}
	if err := placement.CheckRanks(t.inputs.Ranks, recorded.Model.Experts); err != nil {
		return nil, invalidRanks(err)
	}
	if err := placement.CheckSlots(t.inputs.Algorithm, t.inputs.Ranks, recorded.Model.Experts, t.inputs.RedundantSlots); err != nil {
		return nil, invalidf("InvalidPlacement", "spec.redundantExperts: %d makes %v; the spec cannot be changed: create another plan", t.inputs.RedundantSlots*t.inputs.Ranks, err)
	}
	if err := solver.Check(recorded, t.options(tell)); err != nil && !trace.IsInvalid(err) {
		return nil, invalidf("InvalidPlacement", "spec: %v; the spec cannot be changed: create another plan", err)
	}
	found, err := solver.Solve(ctx, recorded, t.options(tell))
	if trace.IsInvalid(err) {
		return nil, invalidf("ProfileInvalid", "the profile's routing trace: %v", err)
	}
	if err != nil || t.inputs.Unshuffled {
		return found, err // no traffic changes a rate that hangs on the number of ranks alone: there is nothing to test for
	}
	tell("Calibrating the drift test", 0, 1)
	if found.Plan.Drift, err = solver.CalibrateDrift(ctx, recorded, found.Plan, found.HeldOut, t.loadCap()); err != nil {
		return nil, err
	}
	if recorded.Model.HiddenSize > 0 {
		if found.Worth, err = solver.WorthOf(ctx, recorded, found, t.options(tell), t.inputs.minimumGainPercent()); err != nil {
			return nil, err
		}
	}
	return found, t.addSchedule(recorded, found.Plan, found.Report.LAR)
}

func (t *task) options(tell func(step string, done, total int)) solver.Options {
	o := t.inputs.options(tell)
	o.Hardware = t.machines
	return o
}

// addSchedule adds what the plan says about the work inside layers, on the machines that it is for.
func (t *task) addSchedule(recorded *trace.Trace, p *solver.Plan, lar float64) (err error) {
	p.Schedule, err = solver.ScheduleLayers(&recorded.Model, p, lar, p.Machines(), t.inputs.RanksPerNode)
	return err
}

// recorded reads the routing trace of a profile, of at most so many bytes, and checks that it is of the profile's model.
func (t *task) recorded(ctx context.Context, scope artifact.Scope, manifest profile.Manifest, bound int64) (*trace.Trace, error) {
	recorded, err := t.trace(ctx, scope, manifest, bound)
	if trace.IsInvalid(err) {
		return nil, invalidf("ProfileInvalid", "the profile's routing trace: %v (the manager's memory limit, %d bytes for each of its solver workers, allows for %d: raise resources.limits.memory, the chart's manager.resources.limits.memory)", err, t.memory, bound)
	}
	if err != nil {
		return nil, fmt.Errorf("read the profile's routing trace: %w", err)
	}
	if digest := recorded.Model.Digest; digest != "" && digest != manifest.ModelDigest {
		return nil, invalidf("ProfileInvalid", "the profile's routing trace is of model %q, the profile of %q", digest, manifest.ModelDigest)
	}
	recorded.Model.Digest = manifest.ModelDigest
	return recorded, nil
}

// trace reads the routing trace as it arrives from the store.
func (t *task) trace(ctx context.Context, scope artifact.Scope, manifest profile.Manifest, maxBytes int64) (*trace.Trace, error) {
	stream, err := t.client.Get(ctx, scope, manifest.Files[profile.TraceFile])
	if err != nil {
		return nil, err
	}
	defer stream.Close()
	recorded, err := trace.Read(stream, maxBytes)
	// What arrived counts only if it was verified to its end; otherwise a fault in it is the transfer's.
	if _, rest := io.Copy(io.Discard, stream); rest != nil {
		return nil, rest
	}
	return recorded, err
}

// tokenizer reads the checkpoint's tokenizer; nil where the profile has none.
func (t *task) tokenizer(ctx context.Context, manifest profile.Manifest) (io.Reader, error) {
	digest, has := manifest.Files[profile.TokenizerFile]
	if !has {
		return nil, nil
	}
	content, err := t.client.ReadAll(ctx, t.scope, digest, maxTokenizerBytes)
	if err != nil {
		return nil, fmt.Errorf("read the profile's tokenizer: %w", err)
	}
	return bytes.NewReader(content), nil
}
