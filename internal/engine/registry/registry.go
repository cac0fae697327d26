// Package registry finds an engine's adapter by the value of spec.engine.type.
package registry

import (
	"fmt"
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

// For returns the adapter of an engine type.
func For(engineType string) (engine.Adapter, error) {
	for _, adapter := range All() {
		if adapter.Type == engineType {
			return adapter, nil
		}
	}
	return engine.Adapter{}, fmt.Errorf("engine type %q is not known: use %s", engineType, Types())
}
