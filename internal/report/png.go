// SPDX-License-Identifier: Apache-2.0

package report

import (
	"bytes"
	"encoding/base64"
	"html/template"
	"image"
	"image/color"
	"image/png"
	"math"
)

// levels is the number of colors of a heat map. With the color for missing values they fit into four bits.
const levels = 15

// palette starts with a transparent color for missing values, followed by colors from nearly white to dark blue. The
// lightness decreases evenly, so that a heat map can be read by color-blind readers and inverted in a dark theme.
var palette = makePalette()

func makePalette() color.Palette {
	p := color.Palette{color.NRGBA{}}
	for i := range levels {
		at := float64(i) / (levels - 1)
		p = append(p, oklch(0.985-0.7*at, 0.002+0.13*math.Sin(math.Pi*0.78*at), 215+60*at))
	}
	return p
}

// oklch converts a color of the OKLCH space (Ottosson 2020) to sRGB and clips it. hue is in degrees.
func oklch(lightness, chroma, hue float64) color.NRGBA {
	a, b := chroma*math.Cos(hue*math.Pi/180), chroma*math.Sin(hue*math.Pi/180)
	l := cube(lightness + 0.3963377774*a + 0.2158037573*b)
	m := cube(lightness - 0.1055613458*a - 0.0638541728*b)
	s := cube(lightness - 0.0894841775*a - 1.2914855480*b)
	return color.NRGBA{
		R: gamma(4.0767416621*l - 3.3077115913*m + 0.2309699292*s),
		G: gamma(-1.2684380046*l + 2.6097574011*m - 0.3413193965*s),
		B: gamma(-0.0041960863*l - 0.7034186147*m + 1.7076147010*s),
		A: math.MaxUint8,
	}
}

func cube(x float64) float64 { return x * x * x }

// gamma converts a linear component to an 8-bit sRGB component.
func gamma(x float64) uint8 {
	x = min(max(x, 0), 1)
	if x <= 0.0031308 {
		x *= 12.92
	} else {
		x = 1.055*math.Pow(x, 1/2.4) - 0.055
	}
	return uint8(math.Round(x * math.MaxUint8))
}

// level returns the palette index of a value.
func (h *Heat) level(v float32) uint8 {
	if v < 0 {
		return 0
	}
	at := 0.0
	if h.Top > h.Low {
		at = (float64(v) - h.Low) / (h.Top - h.Low)
	}
	return 1 + uint8(math.Round(min(max(at, 0), 1)*(levels-1)))
}

// image returns the heat map as a data: URL of a PNG with one pixel per cell.
func (h *Heat) image() (template.URL, error) {
	picture := image.NewPaletted(image.Rect(0, 0, h.Columns, h.Rows), palette)
	for cell, v := range h.Values {
		picture.Pix[cell/h.Columns*picture.Stride+cell%h.Columns] = h.level(v)
	}
	return encode(picture)
}

// scale returns the palette, from the lightest to the darkest color, as a data: URL of a PNG.
func scale() (template.URL, error) {
	picture := image.NewPaletted(image.Rect(0, 0, levels, 1), palette)
	for i := range levels {
		picture.Pix[i] = uint8(i + 1)
	}
	return encode(picture)
}

func encode(picture *image.Paletted) (template.URL, error) {
	var b bytes.Buffer
	encoder := png.Encoder{CompressionLevel: png.BestCompression}
	if err := encoder.Encode(&b, picture); err != nil {
		return "", err
	}
	return template.URL("data:image/png;base64," + base64.StdEncoding.EncodeToString(b.Bytes())), nil
}
