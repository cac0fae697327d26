// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"
)

// start is the start time of the tests.
var start = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// layout describes the actual effect of a plan.
type layout struct {
	name string
	// verdict is the result of comparisons after as many requests as in a soak.
	verdict Verdict
	// broken: replicas never become ready. crashing: they also crash repeatedly.
	broken, crashing bool
}

// simulatedPod is a replica of a workload.
type simulatedPod struct {
	ready bool
	since time.Time
	// homeless: the pod never fits a node.
	homeless bool
}

// workload is a revision in the simulation: a template under a plan. Both are immutable.
type workload struct {
	template int
	plan     *layout
	trial    string // "", Canary or Promoting, as the annotation of a workload
	replicas int32
	pods     map[int32]*simulatedPod
	// leaving are the ordinals of pods that are no longer desired, and not terminating yet. A replacement with the same
	// ordinal is created when they are gone.
	leaving map[int32]bool
}

func (w *workload) name() string { return fmt.Sprintf("t%d/%s", w.template, w.plan.name) }

// world is a simulated cluster with a controller that takes the next step.
type world struct {
	now      time.Time
	budget   Budget
	canary   int32
	soak     time.Duration
	template int
	// unknown: the serving revision is unknown, or changes are paused.
	unknown  bool
	wanted   *layout
	first    *layout
	failed   map[string]string
	hold     bool
	approved bool
	// workloads are ordered from newest to oldest.
	workloads []*workload
	log       []string
	last      string
}

func newWorld(b Budget, first *layout) *world {
	return &world{now: start, budget: b, canary: 1, soak: 5 * time.Minute, first: first, wanted: first, failed: map[string]string{}}
}

// stablePlan returns the plan of the newest proven workload with replicas, else of the newest proven workload.
func (w *world) stablePlan() *layout {
	var newest *layout
	for _, work := range w.workloads {
		switch {
		case work.trial != "":
		case work.replicas > 0:
			return work.plan
		case newest == nil:
			newest = work.plan
		}
	}
	return cmp.Or(newest, w.first)
}

func (w *world) find(template int, plan *layout) int {
	return slices.IndexFunc(w.workloads, func(work *workload) bool { return work.template == template && work.plan == plan })
}

func (w *world) revision(work *workload) Revision {
	r := Revision{Replicas: work.replicas, Existing: int32(len(work.pods) + len(work.leaving)), Ready: make([]bool, work.replicas), Homeless: make([]bool, work.replicas), Trial: work.trial != ""}
	r.Placed = r.Existing
	for ordinal, pod := range work.pods {
		if pod.homeless {
			r.Placed--
		}
		if ordinal < work.replicas {
			r.Ready[ordinal], r.Homeless[ordinal] = pod.ready, pod.homeless
		}
	}
	return r
}

func (w *world) revisions() []Revision {
	var revisions []Revision
	for _, work := range w.workloads {
		revisions = append(revisions, w.revision(work))
	}
	return revisions
}

func (w *world) trial(work *workload) Trial {
	trial := Trial{
		Now: w.now, Canary: CanarySize(w.budget.Replicas, w.canary), Soak: w.soak, Promoting: work.trial == "Promoting", Approved: w.approved, Measured: true,
		Comparison: Comparison{Verdict: TooFew},
	}
	for _, ordinal := range ordinals(work) {
		pod := work.pods[ordinal]
		replica := Replica{Name: fmt.Sprint(ordinal), Ready: pod.ready, Since: pod.since}
		if work.plan.crashing {
			replica.Restarts = 5
		}
		trial.Replicas = append(trial.Replicas, replica)
	}
	if since, serves := trial.ServesSince(); serves && w.now.Sub(since) >= w.soak {
		trial.Comparison = Comparison{Verdict: work.plan.verdict, Reason: "LocalityWorse", Message: "as simulated"}
	}
	return trial
}

func ordinals(work *workload) []int32 {
	var all []int32
	for ordinal := range work.pods {
		all = append(all, ordinal)
	}
	slices.Sort(all)
	return all
}

// decide runs one reconciliation of the controller, and reports whether anything changed.
func (w *world) decide() bool {
	before := w.state()
	if w.unknown {
		in := Input{Budget: w.budget, Stable: None, Candidate: None, Revisions: w.revisions()}
		w.act(in, Next(in))
		return w.state() != before
	}
	stable := w.find(w.template, w.stablePlan())
	if stable == None {
		w.workloads = slices.Insert(w.workloads, 0, &workload{template: w.template, plan: w.stablePlan(), pods: map[int32]*simulatedPod{}, leaving: map[int32]bool{}})
		stable = 0
	}
	serves := w.workloads[stable]
	serves.trial = ""
	in := Input{Budget: w.budget, Stable: stable, Candidate: None, Canary: w.canary, Hold: w.hold}
	if w.wanted != serves.plan && w.failed[w.wanted.name] == "" {
		at := w.find(w.template, w.wanted)
		switch {
		case at != None && w.workloads[at].trial != "":
			in.Candidate = at
		case at == None && MayTry(w.budget, w.revisions(), stable):
			w.workloads = slices.Insert(w.workloads, 0, &workload{template: w.template, plan: w.wanted, trial: "Canary", pods: map[int32]*simulatedPod{}, leaving: map[int32]bool{}})
			in.Stable, in.Candidate = stable+1, 0
		}
	}
	if in.Candidate != None {
		in.Trial = w.trial(w.workloads[in.Candidate])
	}
	in.Revisions = w.revisions()
	action := Next(in)
	w.act(in, action)
	if after := w.state(); after != before {
		w.note(action.Decision)
		return true
	}
	return false
}

func (w *world) act(in Input, action Action) {
	if in.Candidate != None {
		candidate := w.workloads[in.Candidate]
		switch step := action.Decision.Step; {
		case step == StepRollBack && w.hold:
			candidate.trial = "Canary"
		case step == StepRollBack:
			w.failed[candidate.plan.name] = action.Decision.Reason
		case step == StepPromote && candidate.trial == "Canary":
			candidate.trial = "Promoting"
		case step == StepPromote && action.Proven:
			candidate.trial = ""
		}
	}
	kept := map[*workload]bool{}
	for i, work := range w.workloads {
		kept[work] = in.Stable == None || i == in.Stable || i == in.Candidate
	}
	for i, work := range w.workloads {
		work.scale(action.Replicas[i], w.now)
	}
	w.workloads = slices.DeleteFunc(w.workloads, func(work *workload) bool {
		return !kept[work] && work.replicas == 0 && len(work.pods) == 0 && len(work.leaving) == 0
	})
}

// scale simulates a StatefulSet without delay: the highest ordinals are removed first.
func (work *workload) scale(replicas int32, now time.Time) {
	for ordinal := replicas; ordinal < work.replicas; ordinal++ {
		if pod := work.pods[ordinal]; pod != nil {
			delete(work.pods, ordinal)
			if !pod.homeless { // a pod without a node terminates immediately
				work.leaving[ordinal] = true
			}
		}
	}
	work.replicas = replicas
	work.fill(now)
}

// fill creates the missing pods.
func (work *workload) fill(now time.Time) {
	for ordinal := range work.replicas {
		if work.pods[ordinal] == nil && !work.leaving[ordinal] {
			work.pods[ordinal] = &simulatedPod{since: now}
		}
	}
}

// state returns everything that decisions change.
func (w *world) state() string {
	var parts []string
	for _, work := range slices.Backward(w.workloads) {
		parts = append(parts, fmt.Sprintf("%s%s %d/%d", work.name(), map[string]string{"": "", "Canary": " (canary)", "Promoting": " (promoting)"}[work.trial], w.revision(work).ReadyReplicas(work.replicas), work.replicas))
	}
	for _, name := range slices.Sorted(mapKeys(w.failed)) {
		parts = append(parts, "failed "+name)
	}
	return strings.Join(parts, ", ")
}

func mapKeys(m map[string]string) func(func(string) bool) {
	return func(yield func(string) bool) {
		for key := range m {
			if !yield(key) {
				return
			}
		}
	}
}

// note logs a decision that changed something.
func (w *world) note(decision Decision) {
	line := w.state()
	if decision.Reason != "" {
		line += "  [" + decision.Reason + "]"
	}
	if line != w.last {
		w.log = append(w.log, fmt.Sprintf("%8s  %s", w.now.Sub(start), line))
		w.last = line
	}
}

// settle runs the simulation without events until it converges, for at most atMost. It returns how many decisions
// changed something.
func (w *world) settle(atMost time.Duration) int {
	moves, until := 0, w.now.Add(atMost)
	for w.now.Before(until) {
		moved := false
		for w.decide() {
			moved = true
			moves++
			if moves > 10000 {
				return moves
			}
		}
		for _, work := range w.workloads {
			moved = moved || len(work.leaving) > 0
			clear(work.leaving)
			work.fill(w.now)
			for _, ordinal := range ordinals(work) {
				if pod := work.pods[ordinal]; !pod.ready && !pod.homeless && !work.plan.broken {
					pod.ready, pod.since, moved = true, w.now, true
				}
			}
		}
		if moved {
			w.now = w.now.Add(10 * time.Second)
		} else {
			w.now = w.now.Add(time.Minute)
		}
	}
	return moves
}
