// Package registry finds an engine's adapter by the value of spec.engine.type.
package registry

import (
	"fmt"

	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/engine/sglang"
)

// For returns the adapter of an engine type.
func For(engineType string) (engine.Adapter, error) {
	if engineType == "SGLang" {
		return sglang.Adapter(), nil
	}
	return engine.Adapter{}, fmt.Errorf("engine type %q is not known: use SGLang", engineType)
}
