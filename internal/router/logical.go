package router

import (
	"encoding/json"
	"fmt"
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

func (t *translator) wrap(response *http.Response) error {
	return wire.Rewrite(response, func(data []byte, _ bool) ([]byte, error) { return t.translate(data) }, func() {})
}

// translate replaces the routed experts in a JSON text, wherever the engine puts them, and leaves every other byte as it
// is.
func (t *translator) translate(data []byte) (_ []byte, err error) {
	for _, path := range t.engine.ResponsePaths {
		if data, err = wire.EditMember(data, path, t.value); err != nil {
			return nil, err
		}
	}
	return data, nil
}

func (t *translator) value(value []byte) ([]byte, error) {
	var text *string
	if err := json.Unmarshal(value, &text); err != nil {
		return nil, fmt.Errorf("routed experts: %w", err)
	}
	if text == nil {
		return value, nil
	}
	experts, err := t.lease.logicalExperts(t.engine, *text)
	if err != nil {
		return nil, err
	}
	shape := t.lease.Backend.Shape
	return json.Marshal(t.engine.Encode(experts, shape.Layers, shape.ExpertsPerToken))
}
