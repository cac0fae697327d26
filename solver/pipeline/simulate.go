// SPDX-License-Identifier: Apache-2.0

package pipeline

import (
	"cmp"
	"container/heap"
	"fmt"
	"slices"
)

// Resource is a resource that executes one task at a time.
type Resource int

// The attention group executes attention and shared experts; the links and the expert group execute chunks.
const (
	AttentionGroup Resource = iota
	DispatchLink
	ExpertGroup
	CombineLink
	resources
)

func (r Resource) String() string {
	return [...]string{"attention group", "to experts", "expert group", "back"}[r]
}

// Task is a unit of work with its start and end.
type Task struct {
	On Resource `json:"on"`
	// Shared distinguishes shared experts from attention, both of which run on the attention group.
	Shared bool `json:"shared,omitempty"`
	// Layer, MicroBatch and Chunk are 0-based; Chunk is 0 on the attention group.
	Layer      int     `json:"layer"`
	MicroBatch int     `json:"micro_batch"`
	Chunk      int     `json:"chunk"`
	Start      float64 `json:"start_us"`
	End        float64 `json:"end_us"`
}

// Schedule is the timeline of an executed order.
type Schedule struct {
	Sizes     Sizes     `json:"sizes"`
	Durations Durations `json:"durations"`
	Order     Order     `json:"order"`
	// Tasks are sorted by start, resource and end.
	Tasks    []Task  `json:"tasks"`
	Makespan float64 `json:"makespan_us"`
}

// maxTasks is the maximum number of tasks of a simulation: 16 million tasks use about 2 GB.
const maxTasks = 1 << 24

// Check returns an error for sizes that cannot be simulated.
func (s Sizes) Check() error {
	if s.Layers < 1 || s.MicroBatches < 1 || s.Chunks < 1 {
		return fmt.Errorf("there are %d layers, %d micro-batches and %d chunks; all must be at least 1", s.Layers, s.MicroBatches, s.Chunks)
	}
	if tasks := float64(s.Layers) * float64(s.MicroBatches) * (2 + 3*float64(s.Chunks)); tasks > maxTasks {
		return fmt.Errorf("%d layers, %d micro-batches and %d chunks are %.0f tasks; allowed are %d", s.Layers, s.MicroBatches, s.Chunks, tasks, maxTasks)
	}
	return nil
}

// Check returns an error for an order that does not contain each task of a layer exactly once.
func (o Order) Check(microBatches int) error {
	if len(o) != 2*microBatches {
		return fmt.Errorf("the order has %d tasks; %d micro-batches have %d", len(o), microBatches, 2*microBatches)
	}
	for n, step := range slices.Sorted(slices.Values(o)) {
		if step != Step(n-microBatches) {
			return fmt.Errorf("the order %v is not one of attention and shared experts of %d micro-batches", []Step(o), microBatches)
		}
	}
	return nil
}

// simulate executes an order by discrete-event simulation. When a task ends, the tasks that waited only for it become
// ready, and every idle resource starts its oldest ready task; the attention group only starts its next task in the
// order. Closed form and recurrence are tested against the simulator.
func simulate(d Durations, s Sizes, o Order) (*Schedule, error) {
	if err := s.Check(); err != nil {
		return nil, err
	}
	if err := o.Check(s.MicroBatches); err != nil {
		return nil, err
	}
	r := newRun(d, s, o)
	for !r.done() {
		r.step()
	}
	slices.SortFunc(r.finished, func(a, b Task) int {
		return cmp.Or(cmp.Compare(a.Start, b.Start), cmp.Compare(a.On, b.On), cmp.Compare(a.End, b.End), cmp.Compare(a.Layer, b.Layer),
			cmp.Compare(a.MicroBatch, b.MicroBatch), cmp.Compare(a.Chunk, b.Chunk))
	})
	return &Schedule{Sizes: s, Durations: d, Order: slices.Clone(o), Tasks: r.finished, Makespan: r.now}, nil
}

// run is the state of a simulation.
type run struct {
	durations Durations
	sizes     Sizes
	now       float64
	// agenda contains the attention group's remaining tasks in order, queues the ready tasks of the other resources.
	agenda []Task
	queues [resources][]Task
	busy   [resources]bool
	// missing is the number of unfinished prerequisites of the attention of a layer and micro-batch: the chunks and the
	// shared experts of the previous layer.
	missing  []int
	running  ending
	finished []Task
}

func newRun(d Durations, s Sizes, o Order) *run {
	r := &run{durations: d, sizes: s, agenda: agenda(s, o), missing: make([]int, s.Layers*s.MicroBatches)}
	for i := s.MicroBatches; i < len(r.missing); i++ {
		r.missing[i] = s.Chunks + 1
	}
	return r
}

// agenda expands an order over all layers.
func agenda(s Sizes, o Order) []Task {
	var list []Task
	// attended is the number of layers with listed attention, per micro-batch: shared experts belong to the last of
	// them.
	attended := make([]int, s.MicroBatches)
	shared := make([]int, s.MicroBatches)
	add := func(step Step) {
		if i := int(^step); step < 0 && shared[i] < attended[i] {
			list = append(list, Task{Shared: true, Layer: shared[i], MicroBatch: i})
			shared[i]++
		} else if step >= 0 && attended[step] < s.Layers {
			list = append(list, Task{Layer: attended[step], MicroBatch: int(step)})
			attended[step]++
		}
	}
	for range s.Layers + 1 { // one more round for the last shared experts
		for _, step := range o {
			add(step)
		}
	}
	return list
}

func (r *run) done() bool { return len(r.agenda) == 0 && len(r.running) == 0 && r.idle() }

func (r *run) idle() bool {
	for _, queue := range r.queues {
		if len(queue) > 0 {
			return false
		}
	}
	return true
}

// step starts ready tasks on idle resources and advances to the next end of a task.
func (r *run) step() {
	if !r.busy[AttentionGroup] && len(r.agenda) > 0 && r.ready(r.agenda[0]) {
		r.start(r.agenda[0])
		r.agenda = r.agenda[1:]
	}
	for on := DispatchLink; on < resources; on++ {
		if !r.busy[on] && len(r.queues[on]) > 0 {
			r.start(r.queues[on][0])
			r.queues[on] = r.queues[on][1:]
		}
	}
	ended := heap.Pop(&r.running).(Task)
	r.now = ended.End
	r.busy[ended.On] = false
	r.finished = append(r.finished, ended)
	r.follow(ended)
}

// ready reports whether a task may start. Shared experts only wait for their attention, which precedes them on the same
// resource.
func (r *run) ready(t Task) bool {
	return t.Shared || r.missing[t.Layer*r.sizes.MicroBatches+t.MicroBatch] == 0
}

func (r *run) start(t Task) {
	t.Start, t.End = r.now, r.now+r.duration(t)
	r.busy[t.On] = true
	heap.Push(&r.running, t)
}

func (r *run) duration(t Task) float64 {
	switch {
	case t.Shared:
		return r.durations.Shared
	case t.On == AttentionGroup:
		return r.durations.Attention
	case t.On == DispatchLink:
		return r.durations.Dispatch
	case t.On == ExpertGroup:
		return r.durations.Experts
	}
	return r.durations.Combine
}

// follow marks the successors of a task as ready.
func (r *run) follow(t Task) {
	if t.On == CombineLink || t.Shared {
		if t.Layer+1 < r.sizes.Layers {
			r.missing[(t.Layer+1)*r.sizes.MicroBatches+t.MicroBatch]--
		}
		return
	}
	next := t
	next.On++
	if t.On != AttentionGroup {
		r.queues[next.On] = append(r.queues[next.On], next)
		return
	}
	for next.Chunk = range r.sizes.Chunks {
		r.queues[next.On] = append(r.queues[next.On], next)
	}
}

// ending is a heap of the running tasks by end time. Ties are broken by resource, each of which runs at most one task.
type ending []Task

func (e ending) Len() int      { return len(e) }
func (e ending) Swap(i, j int) { e[i], e[j] = e[j], e[i] }
func (e ending) Less(i, j int) bool {
	return e[i].End < e[j].End || e[i].End == e[j].End && e[i].On < e[j].On
}
func (e *ending) Push(t any) { *e = append(*e, t.(Task)) }
func (e *ending) Pop() any {
	last := (*e)[len(*e)-1]
	*e = (*e)[:len(*e)-1]
	return last
}
