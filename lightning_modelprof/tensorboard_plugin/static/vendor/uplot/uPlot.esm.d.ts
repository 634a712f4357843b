import uPlot from "./uPlot";
export default uPlot;
