// SPDX-License-Identifier: Apache-2.0

package router

import (
	"net/http"

	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/router/discovery"
	"github.com/semmoe/operator/internal/router/plans"
	"github.com/semmoe/operator/internal/router/wire"
)

// reportsLogicalExperts reports whether the experts that a backend reports can be converted to logical ids. A permuted
// checkpoint requires the plan that it was made with and the shape of the model.
func reportsLogicalExperts(b discovery.Backend, l *plans.Layout) bool {
	return !b.Permuted || l != nil && b.Shape != nil && l.Renumbers(*b.Shape)
}

// logicalExperts decodes the experts that the backend of the lease reports. It renumbers them if the checkpoint is
// permuted.
func (l *Lease) logicalExperts(engine engine.RoutedExperts, text string) ([]int32, error) {
	shape := l.Backend.Shape
	if shape == nil || !reportsLogicalExperts(l.Backend, l.layout) {
		return nil, errExpertsUnavailable
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

// translator converts the routed experts that a client requested to logical ids, so that responses do not depend on
// whether the checkpoint is permuted.
type translator struct {
	engine engine.RoutedExperts
	lease  *Lease
}

// wrap renumbers the routed experts while the response is streamed, at every path that the engine uses. The experts of
// a long prompt take hundreds of megabytes.
func (t *translator) wrap(response *http.Response) error {
	return wire.EditTexts(response, t.engine.ResponsePaths, t.renumber)
}

func (t *translator) renumber() (wire.TextEditor, error) {
	backend, layout := t.lease.Backend, t.lease.layout
	if backend.Shape == nil || !reportsLogicalExperts(backend, layout) {
		return nil, errExpertsUnavailable
	}
	return t.engine.Renumber(backend.Shape.Layers, backend.Shape.ExpertsPerToken, layout.Logical), nil
}
