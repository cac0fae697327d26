// SPDX-License-Identifier: Apache-2.0

package server

import (
	"encoding/base64"
	"encoding/binary"
)

// encodeRoutes encodes the routes of all tokens except the first start ones in SGLang's wire format: base64 of
// row-major little-endian int32, [tokens][layers][top-k], with logical expert IDs.
func encodeRoutes(routes []uint16, perToken, start int) string {
	routes = routes[min(start*perToken, len(routes)):]
	raw := make([]byte, 0, 4*len(routes))
	for _, expert := range routes {
		raw = binary.LittleEndian.AppendUint32(raw, uint32(expert))
	}
	return base64.StdEncoding.EncodeToString(raw)
}

// wireRoutes returns the encoded routes, or nil if the client did not request them.
func (g *generation) wireRoutes(end *outcome) *string {
	if !g.routes {
		return nil
	}
	text := encodeRoutes(end.routes, g.engine.Model.Layers*g.engine.Model.TopK, g.routesStart)
	return &text
}
