package router

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"

	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/jsonscan"
)

// tellsLogical reports whether the experts that the backend reports can be told by their logical ids. Those of a permuted
// checkpoint can with the plan that it was made by, and the model's shape.
func (b Backend) tellsLogical(l *Layout) bool {
	return !b.Permuted || l != nil && l.slots != nil && b.Shape != nil && l.fits(*b.Shape) == nil
}

// toLogical renumbers the experts of a permuted checkpoint, [tokens][layers][top], in place. Layers that the plan does not
// place stay as they are, and so do ids that are none of a routed expert.
func (l *Layout) toLogical(experts []int32, top int) {
	for at := range experts {
		slots := l.slots[at/top%len(l.slots)]
		if id := experts[at]; id >= 0 && int(id) < len(slots) {
			experts[at] = int32(slots[id])
		}
	}
}

// logicalExperts decodes what the lease's backend reports, and renumbers it where its checkpoint is permuted.
func (l *Lease) logicalExperts(engine engine.RoutedExperts, text string) ([]int32, error) {
	shape := l.Backend.Shape
	if shape == nil || !l.Backend.tellsLogical(l.layout) {
		return nil, errNotTold
	}
	experts, err := engine.Decode(text, shape.Layers, shape.ExpertsPerToken)
	if err != nil {
		return nil, err
	}
	if l.Backend.Permuted {
		l.layout.toLogical(experts, shape.ExpertsPerToken)
	}
	return experts, nil
}

// asks reports whether a body asks for the routed experts by itself. In doubt it does.
func asks(body []byte, field string) bool {
	members, ok := jsonscan.Object(body, nil)
	if !ok {
		// Engines read more than what is JSON by the letter.
		return field != "" && bytes.Contains(body, []byte(field))
	}
	value := jsonscan.Get(body, members, field)
	return value != nil && string(value) != "false" && string(value) != "null"
}

// translator tells a client the routed experts that it has asked for by their logical ids: it must not see that its
// answer came from a permuted checkpoint.
type translator struct {
	engine engine.RoutedExperts
	lease  *Lease
}

func (t *translator) wrap(response *http.Response) error {
	return rewrite(response, func(data []byte, _ bool) ([]byte, error) { return t.translate(data) }, func() {})
}

// translate replaces the routed experts in a JSON text, wherever the engine puts them, and leaves every other byte as it
// is.
func (t *translator) translate(data []byte) (_ []byte, err error) {
	for _, path := range t.engine.ResponsePaths {
		if data, err = editMember(data, path, t.value); err != nil {
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
