// SPDX-License-Identifier: Apache-2.0

package gitops

import (
	"context"
	"fmt"
	"time"

	lua "github.com/yuin/gopher-lua"
)

// health is the result of a script.
type health struct {
	Status  string `json:"status"`
	Message string `json:"message,omitempty"`
}

// statuses are the health statuses of Argo CD. Any other status is an error of the script.
var statuses = []string{"Healthy", "Progressing", "Degraded", "Suspended", "Missing", "Unknown"}

// runScript runs a health check on an object like Argo CD runs a check in argocd-cm: with only the libraries base,
// table and package, and for at most one second.
func runScript(ctx context.Context, script string, object map[string]any) (health, error) {
	state := lua.NewState(lua.Options{SkipOpenLibs: true})
	defer state.Close()
	for name, open := range map[string]lua.LGFunction{lua.LoadLibName: lua.OpenPackage, lua.BaseLibName: lua.OpenBase, lua.TabLibName: lua.OpenTable} {
		if err := state.CallByParam(lua.P{Fn: state.NewFunction(open), Protect: true}, lua.LString(name)); err != nil {
			return health{}, err
		}
	}
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	state.SetContext(ctx)
	state.SetGlobal("obj", luaValue(state, object))
	if err := state.DoString(script); err != nil {
		return health{}, err
	}
	table, ok := state.Get(-1).(*lua.LTable)
	if !ok {
		return health{}, fmt.Errorf("the script returns %s, not a table", state.Get(-1).Type())
	}
	return health{table.RawGetString("status").String(), table.RawGetString("message").String()}, nil
}

// luaValue converts a value of an unstructured object to Lua.
func luaValue(state *lua.LState, value any) lua.LValue {
	switch v := value.(type) {
	case bool:
		return lua.LBool(v)
	case string:
		return lua.LString(v)
	case int64:
		return lua.LNumber(v)
	case float64:
		return lua.LNumber(v)
	case []any:
		table := state.NewTable()
		for _, item := range v {
			table.Append(luaValue(state, item))
		}
		return table
	case map[string]any:
		table := state.NewTable()
		for key, item := range v {
			table.RawSetString(key, luaValue(state, item))
		}
		return table
	}
	return lua.LNil
}
