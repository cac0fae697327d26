// SPDX-License-Identifier: Apache-2.0

package gitops

import (
	"context"
	"fmt"
	"time"

	lua "github.com/yuin/gopher-lua"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// Act runs the script of an action on an object like Argo CD, and returns the changed object. Argo CD patches the
// object with the difference.
func Act(ctx context.Context, script string, object *unstructured.Unstructured) (*unstructured.Unstructured, error) {
	table, err := run(ctx, script, object.Object)
	if err != nil {
		return nil, err
	}
	changed, ok := goValue(table, object.Object).(map[string]any)
	if !ok {
		return nil, fmt.Errorf("the script returns a list, not an object")
	}
	return &unstructured.Unstructured{Object: changed}, nil
}

// run runs a script on an object like Argo CD runs a script in argocd-cm: with only the libraries base, table and
// package, and for at most one second.
func run(ctx context.Context, script string, object map[string]any) (*lua.LTable, error) {
	state := lua.NewState(lua.Options{SkipOpenLibs: true})
	defer state.Close()
	for name, open := range map[string]lua.LGFunction{lua.LoadLibName: lua.OpenPackage, lua.BaseLibName: lua.OpenBase, lua.TabLibName: lua.OpenTable} {
		if err := state.CallByParam(lua.P{Fn: state.NewFunction(open), Protect: true}, lua.LString(name)); err != nil {
			return nil, err
		}
	}
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	state.SetContext(ctx)
	state.SetGlobal("obj", luaValue(state, object))
	if err := state.DoString(script); err != nil {
		return nil, err
	}
	table, ok := state.Get(-1).(*lua.LTable)
	if !ok {
		return nil, fmt.Errorf("the script returns %s, not a table", state.Get(-1).Type())
	}
	return table, nil
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

// goValue converts a value of Lua to a value of an unstructured object. before is the value in the original object: an
// empty table of Lua may be an empty list or an empty map.
func goValue(value lua.LValue, before any) any {
	switch v := value.(type) {
	case lua.LBool:
		return bool(v)
	case lua.LString:
		return string(v)
	case lua.LNumber:
		if whole := int64(v); lua.LNumber(whole) == v {
			return whole
		}
		return float64(v)
	case *lua.LTable:
		former, isMap := before.(map[string]any)
		list, _ := before.([]any)
		if first, _ := v.Next(lua.LNil); v.Len() > 0 || first == lua.LNil && !isMap {
			all := []any{}
			for i := range v.Len() {
				var item any
				if i < len(list) {
					item = list[i]
				}
				all = append(all, goValue(v.RawGetInt(i+1), item))
			}
			return all
		}
		all := map[string]any{}
		v.ForEach(func(key, item lua.LValue) { all[key.String()] = goValue(item, former[key.String()]) })
		return all
	}
	return nil
}
