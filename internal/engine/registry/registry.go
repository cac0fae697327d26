// Package registry finds an engine's adapter by the value of spec.engine.type.
package registry

import (
	"fmt"
	"slices"
	"strings"

	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/engine/sglang"
	"github.com/semmoe/operator/internal/engine/trtllm"
	"github.com/semmoe/operator/internal/engine/vllm"
	"github.com/semmoe/operator/internal/engine/vllmascend"
)

// All lists the adapters of all engines.
func All() []engine.Adapter {
	return []engine.Adapter{sglang.Adapter(), vllm.Adapter(), vllmascend.Adapter(), trtllm.Adapter()}
}

// Types lists the types, for messages.
func Types() string {
	var types []string
	for _, adapter := range All() {
		types = append(types, adapter.Type)
	}
	return strings.Join(types, ", ")
}

// Names lists what the engines call something, each name once; without those that have no name for it.
func Names(of func(engine.Adapter) string) []string {
	var names []string
	for _, adapter := range All() {
		if name := of(adapter); name != "" && !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return names
}

// For returns the adapter of an engine type.
func For(engineType string) (engine.Adapter, error) {
	for _, adapter := range All() {
		if adapter.Type == engineType {
			return adapter, nil
		}
	}
	return engine.Adapter{}, fmt.Errorf("engine type %q is not known: use %s", engineType, Types())
}
