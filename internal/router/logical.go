package router

import (
	"net/http"

	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/router/discovery"
	"github.com/semmoe/operator/internal/router/plans"
	"github.com/semmoe/operator/internal/router/wire"
)

// tellsLogical reports whether the experts that a backend reports can be told by their logical ids. Those of a permuted
// checkpoint can with the plan that it was made by, and the model's shape.
func tellsLogical(b discovery.Backend, l *plans.Layout) bool {
	return !b.Permuted || l != nil && b.Shape != nil && l.Renumbers(*b.Shape)
}

// logicalExperts decodes what the lease's backend reports, and renumbers it where its checkpoint is permuted.
func (l *Lease) logicalExperts(engine engine.RoutedExperts, text string) ([]int32, error) {
	shape := l.Backend.Shape
	if shape == nil || !tellsLogical(l.Backend, l.layout) {
		return nil, errNotTold
	}
	experts, err := engine.Decode(text, shape.Layers, shape.ExpertsPerToken)
	if err != nil {
		return nil, err
	}
	if l.Backend.Permuted {
		l.layout.ToLogical(experts, shape.ExpertsPerToken)
	}
	return experts, nil
}

// translator tells a client the routed experts that it has asked for by their logical ids: it must not see that its
// answer came from a permuted checkpoint.
type translator struct {
	engine engine.RoutedExperts
	lease  *Lease
}

// wrap has the routed experts renumbered as they pass, wherever the engine puts them: those of a long prompt take hundreds of megabytes.
func (t *translator) wrap(response *http.Response) error {
	return wire.EditTexts(response, t.engine.ResponsePaths, t.renumber)
}

func (t *translator) renumber() (wire.TextEditor, error) {
	backend, layout := t.lease.Backend, t.lease.layout
	if backend.Shape == nil || !tellsLogical(backend, layout) {
		return nil, errNotTold
	}
	return t.engine.Renumber(backend.Shape.Layers, backend.Shape.ExpertsPerToken, layout.Logical), nil
}
